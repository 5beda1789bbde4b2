"""Completions that were broken off: what they hold, and whether they had ended."""

from __future__ import annotations

import asyncio

import pytest

from megatron_magistral.rollout.completion import (
    ChunkMeta,
    CompletionBuilder,
    NewTokens,
    how_ended,
)
from megatron_magistral.rollout.generator import Generator, SamplingSettings
from megatron_magistral.rollout.sglang_server import ModelLimits
from megatron_magistral.types import Completion, FinishReason, Span

EOS = 7
SETTINGS = SamplingSettings(max_new_tokens=4, stop_token_ids=(EOS,))


def partial(*ids: int) -> Completion:
    spans = (Span(3, 0, len(ids)),) if ids else ()
    return Completion((1,), ids, (-0.5,) * len(ids), spans, FinishReason.ABORT, "")


def chunk(version: int, *ids: int) -> ChunkMeta:
    return ChunkMeta(str(version), output_token_logprobs=[(-1.0, token, None) for token in ids])


def test_what_a_chunk_brings_follows_what_came_before_it():
    builder = CompletionBuilder((1,), partial(8, 9), 0)
    assert builder.add(chunk(4, 5, 6)) == NewTokens(2, (5, 6), (-1.0, -1.0), 4)
    assert builder.add(chunk(5)) == NewTokens(4, (), (), 5)
    assert builder.build(FinishReason.ABORT).spans == (Span(3, 0, 2), Span(4, 2, 4))


@pytest.mark.parametrize(
    ("ids", "ended"),
    [
        ((), None),
        ((8, 9), None),
        ((8, EOS), FinishReason.STOP),
        ((8, 9, 8, 9), FinishReason.LENGTH),
        ((8, 9, 8, EOS), FinishReason.STOP),
    ],
)
def test_a_completion_that_broke_off_may_have_ended(ids, ended):
    assert how_ended(partial(*ids), 4, (EOS,)) is ended


def test_one_that_had_ended_is_not_sent_to_an_engine_again():
    """A token after its end would be one that the policy never meant to sample."""
    nowhere = Generator("http://127.0.0.1:9", ModelLimits(100, 100), decode=lambda ids: str(ids))
    done = asyncio.run(nowhere.generate([1], SETTINGS, cache_salt="", partial=partial(8, EOS)))
    assert (done.finish_reason, done.output_ids) == (FinishReason.STOP, (8, EOS))
    assert done.text == str((8, EOS))
