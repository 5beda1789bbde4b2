"""The client alone: prompts it refuses, streams it reads, faults it names."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.cluster import free_ports
from megatron_magistral.rollout.completion import (
    ChunkSpan,
    merge_spans,
    parse_spans,
    shift_spans,
)
from megatron_magistral.rollout.engine import (
    ControlTimeouts,
    EngineControl,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    Phase,
    parse_version,
)
from megatron_magistral.rollout.generator import (
    GenerationInterrupted,
    Generator,
    PromptRefused,
    SamplingSettings,
    check_prompt,
)
from megatron_magistral.rollout.sglang_server import ModelLimits
from megatron_magistral.types import Completion, FinishReason, Span
from tests.rollout.fake_engine import FakeEngine, Fault

LIMITS = ModelLimits(vocab_size=100, context_length=50)
SAMPLING = SamplingSettings(max_new_tokens=10)


def event(
    ids: list[int],
    *,
    version: str = "3",
    finish: str | None = None,
    spans=None,
    num_tokens: int | None = None,
    logprob: float | None = None,
) -> bytes:
    """`num_tokens` are those that the response has in all, by the server's own count."""
    meta: dict[str, Any] = {
        "weight_version": version,
        "output_token_logprobs": [
            [-token / 10 if logprob is None else logprob, token, None] for token in ids
        ],
        "finish_reason": finish and {"type": finish},
    }
    if num_tokens is not None:
        meta["completion_tokens"] = num_tokens
    if spans is not None:
        names = ("version", "start", "end")
        meta["weight_versions"] = [dict(zip(names, span, strict=True)) for span in spans]
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
WHOLE = [
    event([5]),
    event([6, 7], version="4"),
    event([8], version="4", finish="stop", spans=[("3", 0, 2), ("4", 2, 4)]),
    DONE,
]


def run(engine: FakeEngine, use: Callable[[Generator], Awaitable[Any]], **arguments: Any) -> Any:
    async def inside() -> Any:
        async with Generator(engine.url, LIMITS, name="e", **arguments) as generator:
            return await asyncio.wait_for(use(generator), 60)

    return asyncio.run(inside())


def sample(engine: FakeEngine, partial: Completion | None = None, **arguments: Any) -> Completion:
    return run(
        engine,
        lambda g: g.generate([1, 2], SAMPLING, cache_salt="v3", partial=partial),
        **arguments,
    )


@pytest.mark.parametrize("whole_stream_at_once", [True, False])
def test_a_stream_becomes_a_completion_however_it_is_cut(whole_stream_at_once: bool) -> None:
    stream = b"".join(WHOLE)
    cuts = [stream] if whole_stream_at_once else [stream[i : i + 7] for i in range(0, 999, 7)]
    with FakeEngine(cuts) as engine:
        completion = sample(engine, decode=lambda ids: "-".join(map(str, ids)))
    assert completion == Completion(
        prompt_ids=(1, 2),
        output_ids=(5, 6, 7, 8),
        logprobs=(-0.5, -0.6, -0.7, -0.8),
        spans=(Span(3, 0, 2), Span(4, 2, 4)),
        finish_reason=FinishReason.STOP,
        text="5-6-7-8",
    )


def test_the_request_says_what_was_asked() -> None:
    with FakeEngine(WHOLE) as engine:
        sample(engine)
        request = engine.requests[0]
    assert request["input_ids"] == [1, 2]
    assert request["cache_salt"] == "v3"
    assert request["return_logprob"] and request["stream"]
    assert request["sampling_params"]["max_new_tokens"] == 10


def test_an_overlap_scheduler_moves_each_boundary_by_one_token() -> None:
    with FakeEngine(WHOLE) as engine:
        assert sample(engine, overlap_schedule=True).spans == (Span(3, 0, 3), Span(4, 3, 4))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (WHOLE[:2], "without a finish reason"),
        ([*WHOLE[:2], event([], finish="abort"), DONE], "abort"),
    ],
)
def test_an_interrupted_response_is_handed_over_with_its_tokens(
    script: list[bytes], why: str
) -> None:
    with FakeEngine(script) as engine, pytest.raises(GenerationInterrupted, match=why) as failure:
        sample(engine)
    partial = failure.value.partial
    assert partial.output_ids == (5, 6, 7)
    assert partial.spans == (Span(3, 0, 1), Span(4, 1, 3))
    assert partial.finish_reason is FinishReason.ABORT
    with FakeEngine([event([9], version="5", finish="length", spans=[("5", 0, 1)])]) as other:
        completion = sample(other, partial)
        request = other.requests[0]
    assert request["input_ids"] == [1, 2, 5, 6, 7]
    assert request["sampling_params"]["max_new_tokens"] == 7
    assert completion.prompt_ids == (1, 2) and completion.output_ids == (5, 6, 7, 9)
    assert completion.spans == (Span(3, 0, 1), Span(4, 1, 3), Span(5, 3, 4))


def test_the_servers_count_of_tokens_begins_anew_with_each_response() -> None:
    partial = Completion((1, 2), (5,), (-0.5,), (Span(3, 0, 1),), FinishReason.ABORT, "")
    with FakeEngine([event([6], num_tokens=1), event([7], num_tokens=2, finish="stop")]) as engine:
        assert sample(engine, partial).output_ids == (5, 6, 7)


def test_an_empty_completion_is_one() -> None:
    with FakeEngine([event([], finish="stop", spans=[], num_tokens=0)]) as engine:
        completion = sample(engine, decode=lambda ids: f"{len(ids)} tokens")
    assert (completion.output_ids, completion.spans) == ((), ())
    assert completion.text == "0 tokens"


def test_breaking_off_hands_over_what_every_response_has_brought_so_far() -> None:
    async def use(generator: Generator) -> list[Any]:
        arrived = [asyncio.Event(), asyncio.Event()]
        running = [
            asyncio.create_task(
                generator.generate(
                    [1, 2],
                    SAMPLING,
                    cache_salt="v3",
                    on_tokens=lambda new, arrival=arrival: arrival.set(),
                )
            )
            for arrival in arrived
        ]
        await asyncio.gather(*(arrival.wait() for arrival in arrived))
        generator.interrupt()
        return await asyncio.gather(*running, return_exceptions=True)

    with FakeEngine([event([5, 6])], stall=True) as engine:
        for error in run(engine, use):
            assert isinstance(error, GenerationInterrupted)
            assert error.partial.output_ids == (5, 6)


def test_a_stalled_stream_is_interrupted_within_its_bound() -> None:
    engine = FakeEngine(WHOLE[:1], stall=True)
    with engine, pytest.raises(GenerationInterrupted, match=r"no token for 1 s") as failure:
        sample(engine, stall_timeout_s=1.0)
    assert failure.value.partial.output_ids == (5,)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ([b'data: {"error": {"message": "too long"}}\n\n'], "too long"),
        ([b"data: {broken\n\n"], "JSON"),
        ([event([5], version="mine")], "weight version 'mine'"),
        ([event([5], finish="stop", spans=[("3", 0, 2)])], "do not cover 1 output tokens"),
        ([event([5], num_tokens=1), event([6], num_tokens=3)], "3 tokens were sampled, 2 came"),
        ([event([5], logprob=math.nan)], "JSON is malformed"),
        ([event([5], logprob=-math.inf)], "JSON is malformed"),
        ([event([5]).replace(b"-0.5", b"null")], "Expected `float`, got `null`"),
    ],
)
def test_an_unsound_response_is_refused(script: list[bytes], why: str) -> None:
    with FakeEngine(script) as engine, pytest.raises(EngineRefused, match=why):
        sample(engine)


def test_nothing_listens_is_a_named_error() -> None:
    async def use() -> None:
        async with Generator(
            f"http://127.0.0.1:{free_ports(1)[0]}", LIMITS, name="e7"
        ) as generator:
            with pytest.raises(GenerationInterrupted, match="engine e7: generate failed"):
                await generator.generate([1], SAMPLING, cache_salt="")
            with pytest.raises(EngineUnreachable, match="engine e7: pause failed"):
                await generator.pause()
            with pytest.raises(EngineTimeout, match="engine e7: wait until ready failed"):
                await generator.wait_ready(0.3, poll_s=0.1)

    asyncio.run(use())


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.HANG, EngineTimeout),
        (Fault.REFUSE, EngineRefused),
        (Fault.DIE, EngineUnreachable),
    ],
)
def test_a_control_call_fails_by_kind_phase_and_time(fault: Fault, kind: type) -> None:
    async def use(generator: EngineControl) -> None:
        await generator.pause()

    bound_s = 0.5 if fault is Fault.HANG else 60.0
    with FakeEngine() as engine:
        engine.faults["/pause_generation"] = fault
        with pytest.raises(kind) as failure:
            run(engine, use, timeouts=ControlTimeouts(pause_s=bound_s))
    assert failure.value.engine == "e" and failure.value.phase is Phase.PAUSE
    assert failure.value.elapsed_s >= (0.5 if fault is Fault.HANG else 0)


@pytest.mark.parametrize(
    ("prompt", "num_new", "why"),
    [
        ([], 1, "empty prompt"),
        ([1, 100], 1, r"prompt id 100 at position 1 is outside \[0, 100\)"),
        ([-1], 1, "prompt id -1"),
        ([1] * 41, 10, "41 prompt tokens \\+ 10 new ones"),
        ([1], 0, "at least one"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(
    prompt: list[int], num_new: int, why: str
) -> None:
    with pytest.raises(PromptRefused, match=why):
        check_prompt(prompt, num_new, LIMITS)


def test_versions_are_integers_and_the_one_from_disk_is_minus_one() -> None:
    assert parse_version("12") == 12
    assert parse_version("default") == -1
    with pytest.raises(ValueError, match="'v12'"):
        parse_version("v12")


def test_a_server_of_which_only_the_http_process_answers_is_not_ready() -> None:
    async def health_alone(generator: Generator) -> None:
        async with EngineControl(generator.url) as control:
            await control.wait_ready(10.0)

    with FakeEngine() as engine:
        run(engine, lambda generator: generator.wait_ready(10.0))
        engine.faults["/server_info"] = Fault.HANG
        run(engine, health_alone)
        with pytest.raises(EngineTimeout, match="engine e: wait until ready failed after"):
            run(engine, lambda generator: generator.wait_ready(0.5))


def test_a_server_that_does_not_say_what_its_cache_holds_is_an_error() -> None:
    with FakeEngine() as engine:
        with pytest.raises(EngineRefused, match="no max_total_num_tokens in /server_info"):
            run(engine, lambda generator: generator.kv_cache_tokens())
        engine.info["max_total_num_tokens"] = 4096
        assert run(engine, lambda generator: generator.kv_cache_tokens()) == 4096


def test_a_server_that_is_being_replaced_is_waited_for() -> None:
    """Its HTTP process has still answered when the other one is gone already."""

    async def replace(generator: Generator) -> None:
        waiting = asyncio.create_task(generator.wait_ready(30.0))
        while "/server_info" not in engine.calls:
            await asyncio.sleep(0.01)
        engine.faults.clear()
        await waiting

    with FakeEngine() as engine:
        engine.faults["/server_info"] = Fault.REFUSE
        run(engine, replace)


@pytest.mark.parametrize(
    "spans",
    [
        [("1", 0, 2), ("2", 3, 4)],
        [("1", 0, 2), ("2", 1, 4)],
        [("2", 0, 2), ("1", 2, 4)],
        [("1", 0, 3)],
        [("1", 1, 4)],
        [],
    ],
)
def test_spans_with_a_gap_an_overlap_or_a_step_back_are_refused(spans) -> None:
    with pytest.raises(ValueError, match="do not cover 4"):
        parse_spans([ChunkSpan(*span) for span in spans], 4)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 3))
def test_shifted_spans_cover_the_same_tokens_in_order(lengths: list[int], lag: int) -> None:
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = [Span(v, bounds[v], bounds[v + 1]) for v in range(len(lengths))]
    shifted = shift_spans(spans, lag)
    for token in range(bounds[-1]):
        owner = next(span.version for span in shifted if span.start <= token < span.end)
        expected = next(s.version for s in spans if s.start <= max(token - lag, 0) < s.end)
        assert owner == expected


def test_neighbours_of_one_version_become_one_span() -> None:
    spans = [Span(1, 0, 2), Span(1, 2, 3), Span(2, 3, 4)]
    assert merge_spans(spans) == (Span(1, 0, 3), Span(2, 3, 4))
