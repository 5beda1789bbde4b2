"""Memory of a GPU: weights, gradients, optimizer, activations, logits, a generator's cache. Pure.

Weights, gradients and optimizer are counted from the tensors that a rank holds, and are exact but
for the padding of Megatron's buffers (below 0.1 %). Activations are those that the backward pass
waits for, at the longest microbatch; what a kernel needs for itself and fragmentation are not in
them, which is what a reserve is for.

Elements that one layer keeps for each of T tokens (a slash divides by TP, an asterisk only under
sequence parallelism):

                                                        our layers         Transformer Engine's
    two norms, each its input and output                4 H *              4 H *
    fused QKV; q and k rotated                          (2A + 3K) D /      (2A + 3K) D /
    attention's output, the projection's input          2 A D /            A D /
    SwiGLU: gate and up, (silu of the gate,) product    4 F /              3 F /

With recomputation a layer keeps its input alone, and the one whose backward pass runs all of the
above.

Shapes: H hidden size, A attention heads and K kv heads of size D, F feed-forward size.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.logprobs import CHUNK_ELEMENTS
from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.names import Param, parameters, shard_shape
from megatron_magistral.weights.placement import (
    GeneratorLayout,
    TrainerLayout,
    needed,
    stage_of,
    tensors,
)

FP32_BYTES = 4
MOMENTS_BYTES = 8  # Adam's two, fp32
CHUNKS_ALIVE = 2  # of fp32 logits: the scores and their probabilities or gradient


@dataclass(frozen=True, kw_only=True)
class Training:
    """What of a run decides its trainers' memory. `itemsize` is bytes of a weight."""

    microbatch_tokens: int
    num_microbatches: int
    itemsize: int = 2
    recompute: bool = False
    has_average: bool = False
    """A moving average of the weights is kept."""
    fused: bool = True
    """Transformer Engine's layers, else ours."""


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """Bytes on each GPU of pipeline stage `stage`."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    head: int
    """The vocabulary projection: rows, chunks of logits, the gradient of its weight."""

    @property
    def total(self) -> int:
        held = self.weights + self.gradients + self.optimizer + self.average
        return held + self.activations + self.head


@dataclass(frozen=True, kw_only=True)
class GeneratorMemory:
    """Bytes on each GPU of a generator."""

    weights: int
    kv_token: int
    """Of one token in the cache."""

    def kv_tokens(self, memory_bytes: float) -> int:
        """How many tokens the cache holds in what weights leave of `memory_bytes`."""
        return max(0, math.floor((memory_bytes - self.weights) / self.kv_token))


def trainer_memory(
    arch: Architecture, layout: ParallelLayout, training: Training
) -> list[TrainerMemory]:
    """Each pipeline stage's, first to last."""
    # The same for every number of replicas, and slow to count where experts are many.
    dense, expert = _elements(arch, replace(layout, dp=layout.ep))
    expert_copies = layout.tp * layout.dp // (layout.etp * layout.ep)
    state_bytes = MOMENTS_BYTES + (FP32_BYTES if training.itemsize < FP32_BYTES else 0)
    found = []
    for stage in range(layout.pp):
        held = dense[stage] + expert[stage]
        owned = math.ceil(dense[stage] / layout.dp) + math.ceil(expert[stage] / expert_copies)
        is_last = stage == layout.pp - 1
        found.append(
            TrainerMemory(
                stage=stage,
                weights=held * training.itemsize,
                gradients=held * FP32_BYTES,
                optimizer=owned * state_bytes,
                average=held * FP32_BYTES if training.has_average else 0,
                activations=_activations(arch, layout, training, stage),
                head=_head(arch, layout, training) if is_last else 0,
            )
        )
    return found


@cache
def generator_memory(
    arch: Architecture, layout: GeneratorLayout, itemsize: int = 2
) -> GeneratorMemory:
    """Of the rank that holds most, which is the first: kv heads beyond the ranks are whole."""
    num_elements = 0
    for tensor in tensors(arch, TrainerLayout()):
        part = len(needed(tensor, layout, arch, 0))
        num_elements += tensor.num_elements // tensor.length * part
    kv_heads = math.ceil(arch.num_kv_heads / layout.tp)
    return GeneratorMemory(
        weights=num_elements * itemsize,
        kv_token=2 * arch.num_layers * kv_heads * arch.head_dim * itemsize,
    )


@cache
def _elements(arch: Architecture, layout: ParallelLayout) -> tuple[Counter[int], Counter[int]]:
    """Elements that a rank of each stage holds: of what every one has a part of, of experts."""
    dense: Counter[int] = Counter()
    expert: Counter[int] = Counter()
    for param in parameters(arch).values():
        if param.is_copy and layout.pp == 1:
            continue  # tied embeddings are one tensor where one rank holds both ends
        stage = stage_of(param, arch, layout)
        if param.expert is None:
            dense[stage] += math.prod(shard_shape(param, layout.tp))
        elif _is_first_share(param, arch, layout):
            expert[stage] += math.prod(shard_shape(param, layout.etp))
    return dense, expert


def _is_first_share(param: Param, arch: Architecture, layout: ParallelLayout) -> bool:
    assert arch.experts is not None and param.expert is not None
    return param.expert < arch.experts.num // layout.ep


def _activations(arch: Architecture, layout: ParallelLayout, training: Training, stage: int) -> int:
    """At the moment when most microbatches are under way on this stage."""
    layer = _layer(arch, layout, training)
    kept = layer
    if training.recompute:
        kept = _hidden(arch, layout, training) * training.itemsize
    num_layers = _layers_under_way(arch, layout, training.num_microbatches, stage)
    total = num_layers * kept + (layer if training.recompute else 0)
    if stage == layout.pp - 1:  # the last norm's input: of its output the head takes rows
        total += _hidden(arch, layout, training) * training.itemsize
    return round(total)


def _layers_under_way(
    arch: Architecture, layout: ParallelLayout, num_microbatches: int, stage: int
) -> float:
    """Layers of this stage, counted once for each microbatch whose backward pass is to come: 1F1B,
    interleaved where a rank has several chunks."""
    after = layout.pp - stage - 1
    chunk_layers = arch.num_layers / (layout.pp * layout.vpp)
    if layout.vpp == 1:
        return chunk_layers * min(num_microbatches, after + 1)
    warm_up = 2 * after + (layout.vpp - 1) * layout.pp
    return chunk_layers * min(num_microbatches * layout.vpp, warm_up + 1)


def _hidden(arch: Architecture, layout: ParallelLayout, training: Training) -> float:
    """Elements of one hidden state of every token, as this rank keeps it."""
    parts = layout.tp if layout.splits_sequence else 1
    return training.microbatch_tokens / parts * arch.hidden_size


def _norm(arch: Architecture, layout: ParallelLayout, training: Training) -> float:
    """Bytes, of its input and its output."""
    return 2 * _hidden(arch, layout, training) * training.itemsize


def _layer(arch: Architecture, layout: ParallelLayout, training: Training) -> float:
    """Bytes of one layer for one microbatch, nothing recomputed."""
    tokens, tp = training.microbatch_tokens, layout.tp
    heads, kv_heads, size = arch.num_heads / tp, arch.num_kv_heads / tp, arch.head_dim
    attention = (2 * heads + 3 * kv_heads) * size  # QKV; q and k rotated
    attention += heads * size * (1 if training.fused else 2)
    elements = tokens * attention + _feed_forward(arch, layout, training)
    return 2 * _norm(arch, layout, training) + elements * training.itemsize


def _feed_forward(arch: Architecture, layout: ParallelLayout, training: Training) -> float:
    """Elements of one layer for one microbatch; experts are taken to be equally busy."""
    tokens, tp = training.microbatch_tokens, layout.tp
    copies = 3 if training.fused else 4
    if arch.experts is None:
        return tokens * copies * arch.ffn_hidden_size / tp
    experts = arch.experts
    # Tokens that this rank's experts see: those of its own share of the sequence, or, where the
    # experts are divided over the tensor-parallel ranks, of the whole of it.
    seen = tokens * layout.etp / tp * experts.top_k
    width = experts.ffn_hidden_size / layout.etp
    total = seen * (arch.hidden_size + copies * width)
    total += 3 * tokens / tp * experts.num  # scores
    if experts.shared_ffn_hidden_size is not None:
        total += tokens * copies * experts.shared_ffn_hidden_size / tp
    return total


def _head(arch: Architecture, layout: ParallelLayout, training: Training) -> int:
    """Every token is taken for a trained row."""
    rows, columns = training.microbatch_tokens, math.ceil(arch.vocab_size / layout.tp)
    chunk = min(rows * columns, max(CHUNK_ELEMENTS, columns))
    hidden = rows * arch.hidden_size * training.itemsize
    # The rows, gathered over tensor-parallel ranks first, and their gradient.
    num_hidden = 3 if layout.splits_sequence else 2
    weight_gradient = columns * arch.hidden_size * FP32_BYTES
    return num_hidden * hidden + CHUNKS_ALIVE * chunk * FP32_BYTES + weight_gradient
