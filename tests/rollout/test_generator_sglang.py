"""The generator and the weight sender against a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import pytest
from transformers import LlamaForCausalLM

from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.generator import Generator, PromptRefused, SamplingSettings
from megatron_magistral.rollout.sglang_server import ServerSettings, model_limits
from megatron_magistral.types import Completion, FinishReason, Span
from megatron_magistral.weights.delivery import EngineAddress
from megatron_magistral.weights.settings import PlanKind
from tests.rollout.conftest import Server
from tests.rollout.models import random_model
from tests.rollout.policies import (
    TOLERANCE,
    assert_spans_cover,
    buckets_of,
    max_error,
    replay,
    sender_for,
)

pytestmark = pytest.mark.sglang


T = TypeVar("T")


def with_generator(
    server: ServerSettings, use: Callable[[Generator], Awaitable[T]], timeout_s: float = 120.0
) -> T:
    async def run() -> T:
        async with Generator(server.url, model_limits(server)) as generator:
            return await asyncio.wait_for(use(generator), timeout_s)

    return asyncio.run(run())


def update(server: ServerSettings, model: LlamaForCausalLM, version: int) -> None:
    with sender_for(model) as sender:
        sender.connect([EngineAddress(server.url)])
        sender.send(buckets_of(model), version)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_agree_with_transformers(server: ServerSettings, temperature: float) -> None:
    update(server, random_model(0), 0)
    sampling = SamplingSettings(max_new_tokens=100, temperature=temperature, ignore_eos=True)

    async def use(generator: Generator) -> Sequence[Completion]:
        prompts = [[1, 10 + i, 20, 30] for i in range(4)]
        return await asyncio.gather(
            *(generator.generate(p, sampling, cache_salt="v0") for p in prompts)
        )

    for completion in with_generator(server, use):
        assert len(completion.output_ids) == 100
        expected = replay(completion, {0: random_model(0)}, temperature)
        assert max_error(completion, expected) < TOLERANCE


@pytest.mark.parametrize("plan", PlanKind)
def test_updates_in_mid_generation_keep_every_request_and_its_kv_cache(
    plan: PlanKind, server: ServerSettings
) -> None:
    policies = {version: random_model(version) for version in range(3, 7)}
    updates = {version: buckets_of(model) for version, model in policies.items()}
    update(server, policies[3], 3)
    sampling = SamplingSettings(max_new_tokens=480, ignore_eos=True)
    seen = [0] * 8

    def count(index: int) -> Callable[[NewTokens], None]:
        def on_tokens(new: NewTokens) -> None:
            seen[index] += len(new.ids)

        return on_tokens

    async def use(generator: Generator) -> Sequence[Completion]:
        with sender_for(policies[3], plan) as sender:
            await asyncio.to_thread(sender.connect, [EngineAddress(server.url)])
            prompts = [[1, 5] + [7] * i for i in range(len(seen))]
            running = [
                asyncio.create_task(
                    generator.generate(prompt, sampling, cache_salt="v3", on_tokens=count(i))
                )
                for i, prompt in enumerate(prompts)
            ]
            for version in (4, 5, 6):
                target = min(seen) + 20
                while min(seen) < target:
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(sender.send, updates[version], version)
            return await asyncio.gather(*running)

    for completion in with_generator(server, use):
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.output_ids) == 480
        assert_spans_cover(completion)
        assert completion.spans[0].version == 3 and completion.spans[-1].version == 6
        assert max_error(completion, replay(completion, policies)) < TOLERANCE


@pytest.mark.parametrize("salts", [("v7", "v8"), ("same", "same")])
def test_a_new_request_does_not_reuse_a_prefix_of_older_weights(
    server: ServerSettings, salts: tuple[str, str]
) -> None:
    old, new = random_model(7), random_model(8)
    prompt = [1, *range(100, 140)]
    sampling = SamplingSettings(max_new_tokens=40, ignore_eos=True)

    async def use(generator: Generator) -> tuple[Completion, Completion]:
        await asyncio.to_thread(update, server, old, 7)
        before = await generator.generate(prompt, sampling, cache_salt=salts[0])
        await asyncio.to_thread(update, server, new, 8)
        return before, await generator.generate(prompt, sampling, cache_salt=salts[1])

    before, after = with_generator(server, use)
    assert max_error(before, replay(before, {7: old})) < TOLERANCE
    assert max_error(after, replay(after, {8: new})) < TOLERANCE


@pytest.mark.slow
def test_a_request_that_waits_in_the_queue_through_an_update_starts_on_the_new_weights(
    start_server: Callable[..., AbstractContextManager[Server]],
) -> None:
    """Its prefix is in the cache, computed by the old weights, and its salt is older, too."""
    old, new = random_model(1), random_model(2)
    prompt = [1, *range(100, 140)]

    def sampling(num_tokens: int) -> SamplingSettings:
        return SamplingSettings(max_new_tokens=num_tokens, ignore_eos=True)

    async def use(generator: Generator) -> tuple[Completion, Completion]:
        with sender_for(old) as sender:
            await asyncio.to_thread(sender.connect, [EngineAddress(generator.url)])
            await asyncio.to_thread(sender.send, buckets_of(old), 1)
            await generator.generate(prompt, sampling(8), cache_salt="v1")
            running = asyncio.create_task(
                generator.generate([1, 5], sampling(500), cache_salt="v1")
            )
            await wait_for_load(generator, "num_running_reqs", 1)
            waiting = asyncio.create_task(generator.generate(prompt, sampling(40), cache_salt="v1"))
            await wait_for_load(generator, "num_waiting_reqs", 1)
            await asyncio.to_thread(sender.send, buckets_of(new), 2)
            return await running, await waiting

    with start_server(max_running_requests=1) as only_one:
        began_before, waited = with_generator(only_one.settings, use)
    assert [span.version for span in began_before.spans] == [1, 2]
    assert max_error(began_before, replay(began_before, {1: old, 2: new})) < TOLERANCE
    assert [span.version for span in waited.spans] == [2]
    assert max_error(waited, replay(waited, {2: new})) < TOLERANCE


async def wait_for_load(generator: Generator, what: str, number: int) -> None:
    """Wait until the scheduler reports `number` requests as running or waiting."""
    while True:
        async with generator.session.get(generator.url + "/v1/loads") as response:
            (load,) = (await response.json())["loads"]
        if load[what] == number:
            return
        await asyncio.sleep(0.01)


def test_a_bad_id_is_refused_and_the_server_lives_on(server: ServerSettings) -> None:
    async def use(generator: Generator) -> Completion:
        sampling = SamplingSettings(max_new_tokens=4, ignore_eos=True)
        for bad in (320, -1):
            with pytest.raises(PromptRefused, match=f"prompt id {bad} at position 1"):
                await generator.generate([1, bad], sampling, cache_salt="")
        return await generator.generate([1, 319], sampling, cache_salt="")

    assert len(with_generator(server, use).output_ids) == 4


@pytest.mark.parametrize("num_prompt", [2, 500, 511])
def test_prompt_and_output_may_fill_the_context(server: ServerSettings, num_prompt: int) -> None:
    async def use(generator: Generator) -> Completion:
        num_new = server.context_length - num_prompt
        sampling = SamplingSettings(max_new_tokens=num_new, ignore_eos=True)
        return await generator.generate([1] * num_prompt, sampling, cache_salt="")

    completion = with_generator(server, use)
    assert len(completion.prompt_ids) + len(completion.output_ids) == server.context_length
    assert completion.finish_reason is FinishReason.LENGTH


def test_the_stop_token_is_part_of_the_output(server: ServerSettings) -> None:
    async def use(generator: Generator) -> Completion:
        stop_ids = tuple(range(3, 160))
        sampling = SamplingSettings(max_new_tokens=200, stop_token_ids=stop_ids)
        return await generator.generate([1, 5], sampling, cache_salt="")

    completion = with_generator(server, use)
    assert completion.finish_reason is FinishReason.STOP
    assert 2 <= completion.output_ids[-1] < 160  # the model's own end of sequence is 2
    assert len(completion.logprobs) == len(completion.output_ids)


def test_an_interrupted_completion_continues_where_it_broke_off(server: ServerSettings) -> None:
    update(server, random_model(0), 9)

    async def use(generator: Generator) -> Completion:
        sampling = SamplingSettings(max_new_tokens=50, ignore_eos=True)
        whole = await generator.generate([1, 5, 6], sampling, cache_salt="v9")
        partial = Completion(
            prompt_ids=whole.prompt_ids,
            output_ids=whole.output_ids[:10],
            logprobs=whole.logprobs[:10],
            spans=(Span(9, 0, 10),),
            finish_reason=FinishReason.ABORT,
            text="",
        )
        return await generator.generate([1, 5, 6], sampling, cache_salt="v9", partial=partial)

    completion = with_generator(server, use)
    assert len(completion.output_ids) == 50
    assert [(span.version, span.start, span.end) for span in completion.spans] == [(9, 0, 50)]
    assert max_error(completion, replay(completion, {9: random_model(0)})) < TOLERANCE


def test_a_server_says_how_many_tokens_its_cache_holds(server: ServerSettings) -> None:
    held = with_generator(server, lambda generator: generator.kv_cache_tokens())
    assert held == server.max_total_tokens


def test_the_plugin_is_active_in_the_scheduler(server: ServerSettings) -> None:
    async def use(generator: Generator) -> dict:
        await generator.check_server()
        return await generator.server_info()

    info = with_generator(server, use)
    assert info["internal_states"][0]["magistral_plugin"]["active"]
