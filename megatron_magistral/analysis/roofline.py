"""How fast a model trains and generates on GPUs that are not at hand: by its arithmetic and its
traffic, whichever takes longer. Pure.

A decoding step reads the weights once for all completions, and each one's keys and values:

    step = max((weights + c * context * kv) / bandwidth, c * 2 * parameters / flops)
           + all-reduces + scheduling

Training costs 6 floating-point operations a token and active parameter, and attention's 12 A D
context a layer; recomputation a third more. A pipeline of P stages idles for P - 1 microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megatron_magistral.analysis.hardware import Assumptions, Gpu
from megatron_magistral.analysis.memory import GeneratorMemory
from megatron_magistral.analysis.speeds import SpeedCurve
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.presets import num_parameters

TERA, GIGA = 1e12, 1e9
BACKWARD = 3  # forward and backward, in forward passes
RECOMPUTED = 4


@dataclass(frozen=True)
class Parameters:
    """Of the matrices that multiply; the embedding only looks up. `active` serve one token."""

    experts: float
    rest: float
    active: float

    @classmethod
    @cache
    def of(cls, arch: Architecture) -> Parameters:
        lookup = 0 if arch.tied_embeddings else arch.vocab_size * arch.hidden_size
        total = num_parameters(arch) - lookup
        if arch.experts is None:
            return cls(0.0, total, total)
        of_one = 3 * arch.experts.ffn_hidden_size * arch.hidden_size
        experts = arch.num_layers * arch.experts.num * of_one
        used = experts * arch.experts.top_k / arch.experts.num
        return cls(experts, total - experts, total - experts + used)


def decode_curve(
    arch: Architecture,
    tp: int,
    memory: GeneratorMemory,
    context_tokens: float,
    most: int,
    gpu: Gpu,
    assumed: Assumptions,
) -> SpeedCurve:
    """Of one generator on `tp` GPUs, up to `most` completions with `context_tokens` behind each."""
    counts = [2**k for k in range(max(1, most).bit_length()) if 2**k < most] + [max(1, most)]
    parameters = Parameters.of(arch)
    bandwidth = gpu.hbm_gb_s * GIGA * assumed.decode_bandwidth
    flop_s = gpu.tflop_s * TERA * assumed.decode_mfu * tp
    reduce_s = 2 * arch.num_layers * assumed.all_reduce_s if tp > 1 else 0.0
    points = []
    for count in counts:
        share = _experts_read(arch, count)
        read = memory.weights * (parameters.rest + parameters.experts * share)
        read /= parameters.rest + parameters.experts
        read += count * context_tokens * memory.kv_token
        arithmetic_s = count * 2 * parameters.active / flop_s
        step_s = max(read / bandwidth, arithmetic_s) + reduce_s + assumed.decode_step_s
        points.append((float(count), count / step_s))
    return SpeedCurve(tuple(points))


def _experts_read(arch: Architecture, count: int) -> float:
    """Share of the experts that at least one of `count` tokens is sent to."""
    if arch.experts is None:
        return 1.0
    return 1.0 - (1.0 - arch.experts.top_k / arch.experts.num) ** count


def start_s(
    arch: Architecture, tp: int, prompt_tokens: float, gpu: Gpu, assumed: Assumptions
) -> float:
    """What the prompt of a new completion takes one generator."""
    flops = 2 * Parameters.of(arch).active * prompt_tokens
    return flops / (gpu.tflop_s * TERA * assumed.prefill_mfu * tp)


def train_flops_per_token(
    arch: Architecture, lengths: Sequence[float], prompt_tokens: float, recompute: bool
) -> float:
    """Of forward and backward, mean over the tokens of completions with these lengths."""
    wholes = [prompt_tokens + length for length in lengths]
    # A token attends to half of its sequence on average; long sequences have more tokens.
    context = sum(whole**2 for whole in wholes) / (2 * sum(wholes))
    attention = 4 * arch.num_layers * arch.num_heads * arch.head_dim * context
    forward = 2 * Parameters.of(arch).active + attention
    return forward * (RECOMPUTED if recompute else BACKWARD)


def train_tokens_per_s(
    flops_per_token: float,
    layout: ParallelLayout,
    num_microbatches: int,
    gpu: Gpu,
    assumed: Assumptions,
) -> float:
    """Of all trainer GPUs; `num_microbatches` are those of one replica in a step."""
    bubble = (layout.pp - 1) / layout.vpp
    busy = num_microbatches / (num_microbatches + bubble)
    flop_s = gpu.tflop_s * TERA * assumed.train_mfu * layout.world_size
    return flop_s * busy / flops_per_token


def microbatches(num_tokens: float, dp: int, microbatch_tokens: int) -> int:
    """Of one data-parallel replica in a step; greedy collation leaves next to no padding."""
    return max(1, math.ceil(num_tokens / dp / microbatch_tokens))
