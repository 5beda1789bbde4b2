"""What an SFT step trains: traces as tokens, of which only the response counts.

The traces of a step are a function of (seed, step): nothing to save, nothing to lose on resume.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from megatron_magistral.prompts import trace_prompt
from megatron_magistral.types import Trace, TrainSequence

log = logging.getLogger(__name__)

EncodedTrace = tuple[list[int], list[int]]
"""Prompt ids; response ids, ending in the end-of-sequence token."""


def encode_traces(
    traces: Sequence[Trace], tokenizer: PreTrainedTokenizerBase, template: str, max_tokens: int
) -> list[EncodedTrace]:
    """Token ids of every trace that fits into `max_tokens`; the log says how many did not.

    Raises ValueError if none fits.
    """
    encoded = [
        (
            tokenizer.encode(trace_prompt(trace, template)),
            [*tokenizer.encode(trace.response, add_special_tokens=False), tokenizer.eos_token_id],
        )
        for trace in traces
    ]
    fitting = [pair for pair in encoded if len(pair[0]) + len(pair[1]) <= max_tokens]
    if len(fitting) < len(encoded):
        num_long = len(encoded) - len(fitting)
        log.warning("set aside %d traces of more than %d tokens", num_long, max_tokens)
    if not fitting:
        raise ValueError(f"none of {len(traces)} traces fits into {max_tokens} tokens")
    return fitting


def sft_sequences(traces: Sequence[EncodedTrace]) -> list[TrainSequence]:
    """Sequences of one step, each response token weighted 1 / (response tokens of the step)."""
    num_tokens = sum(len(response) for _, response in traces)
    return [
        TrainSequence(
            tokens=(*prompt, *response),
            num_prompt_tokens=len(prompt),
            logprobs=(),
            spans=(),
            advantage=0.0,
            weight=1.0 / num_tokens,
        )
        for prompt, response in traces
    ]


def step_indices(step: int, num_traces: int, batch_size: int, seed: int) -> list[int]:
    """Which traces `step` trains: epochs, each a permutation of its own, cut into batches."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    pairs = [divmod(position, num_traces) for position in positions]
    return [_permutation(epoch, num_traces, seed)[place] for epoch, place in pairs]


@lru_cache(maxsize=2)
def _permutation(epoch: int, num_traces: int, seed: int) -> list[int]:
    order = list(range(num_traces))
    random.Random(f"{seed}/sft/{epoch}").shuffle(order)
    return order
