"""Policies as random tiny models: sent to servers, and replayed by `transformers` alone.

T  output tokens    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from megatron_magistral.rollout.engine import TensorSpec
from megatron_magistral.types import Completion
from megatron_magistral.weights.manifest import manifest_of
from megatron_magistral.weights.settings import PlanKind
from megatron_magistral.weights.transfer import WeightSender

# fp32 on both sides, other kernels.
TOLERANCE = 1e-4


def manifest(model: LlamaForCausalLM) -> Sequence[TensorSpec]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return manifest_of(shapes, torch.float32)


def sender_for(model: LlamaForCausalLM, plan: PlanKind = PlanKind.GATHER) -> WeightSender:
    return WeightSender(manifest(model), backend="gloo", dtype=torch.float32, plan=plan)


def buckets_of(model: LlamaForCausalLM, tensors_per_bucket: int = 6) -> list[list]:
    named = [(name, tensor.detach()) for name, tensor in model.state_dict().items()]
    return [named[i : i + tensors_per_bucket] for i in range(0, len(named), tensors_per_bucket)]


def replay(
    completion: Completion, policies: dict[int, LlamaForCausalLM], temperature: float = 1.0
) -> Tensor:
    """Teacher-forced log-probabilities [T], each span by its version on the KV cache kept so far.

    The forward that samples output token t reads tokens up to t - 1, so a span [start, end) is
    what the positions [start - 1, end - 1) of the output compute.
    """
    ids = torch.tensor([completion.prompt_ids + completion.output_ids])
    num_prompt = len(completion.prompt_ids)
    cache, position, logprobs = None, 0, []
    for span in completion.spans:
        end = num_prompt + span.end - 1
        with torch.no_grad():
            output = policies[span.version](ids[:, position:end], past_key_values=cache)
        cache = output.past_key_values
        sampled = ids[0, num_prompt + span.start : num_prompt + span.end]
        logits = output.logits[0, num_prompt + span.start - 1 - position :]  # [span, V]
        logprobs.append(torch.log_softmax(logits / temperature, -1).gather(1, sampled[:, None]))
        position = end
    return torch.cat(logprobs).squeeze(1)


def max_error(completion: Completion, expected: Tensor) -> float:
    return (torch.tensor(completion.logprobs) - expected).abs().max().item()


def assert_spans_cover(completion: Completion) -> None:
    """Spans are in the order of versions, without gap or overlap, over all output tokens."""
    versions = [span.version for span in completion.spans]
    assert versions == sorted(set(versions))
    bounds = [0, *(span.end for span in completion.spans)]
    assert [span.start for span in completion.spans] == bounds[:-1]
    assert bounds[-1] == len(completion.output_ids) == len(completion.logprobs)
