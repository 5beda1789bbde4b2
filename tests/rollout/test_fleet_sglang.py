"""A fleet of real SGLang servers behind the pool: updates under load, faults, restarts.

Two replicas with one rank each, then with two ranks each; with one rank it takes two minutes:

    pytest -m slow tests/rollout/test_fleet_sglang.py [-k tp1]
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_magistral.rollout.engine import EngineControl, EngineMismatch
from megatron_magistral.rollout.engine_pool import EnginePool, PoolSettings
from megatron_magistral.rollout.engine_state import EngineState
from megatron_magistral.rollout.generator import Generator, SamplingSettings
from megatron_magistral.rollout.sglang_server import model_limits
from megatron_magistral.types import Completion, FinishReason
from megatron_magistral.weights.delivery import EngineAddress
from megatron_magistral.weights.fleet import Fleet, FleetSettings, Round
from megatron_magistral.weights.group import HostedGroup
from megatron_magistral.weights.manifest import manifest_of
from megatron_magistral.weights.probe import probe_gap
from megatron_magistral.weights.probe_engines import PendingProbe
from megatron_magistral.weights.settings import PlanKind
from megatron_magistral.weights.transfer import UpdateFailed, WeightSender
from tests.rollout.conftest import Server
from tests.rollout.models import random_model
from tests.rollout.policies import (
    TOLERANCE,
    assert_spans_cover,
    buckets_of,
    manifest,
    max_error,
    replay,
    sender_for,
)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

policy = functools.cache(random_model)  # by its version
prompts = count()
versions = count(1)  # no version twice, whichever tests run on these servers


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="tp1"), pytest.param(2, id="tp2")],
)
def servers(
    request: pytest.FixtureRequest, start_server: Callable[..., Any]
) -> Iterator[list[Server]]:
    """Two replicas. The last test kills the second one."""
    with ExitStack() as stack:
        if request.param == 1:
            first = request.getfixturevalue("shared_server")
        else:
            first = stack.enter_context(start_server(tp=request.param))
        yield [first, stack.enter_context(start_server(tp=request.param))]


@pytest.fixture(params=PlanKind)
def plan(request: pytest.FixtureRequest) -> PlanKind:
    return request.param


@pytest.fixture
def fleet(servers: list[Server], plan: PlanKind) -> Iterator[Fleet]:
    fleet = Fleet(sender_for(policy(0), plan), addresses(servers), FleetSettings(alive_s=5.0))
    fleet.connect()
    yield fleet
    fleet.close()


def addresses(servers: list[Server]) -> list[EngineAddress]:
    return [EngineAddress(s.settings.url, s.settings.tp) for s in servers]


async def update(fleet: Fleet, version: int, pool: EnginePool | None = None) -> list[Round]:
    """All rounds of an update to policy `version`, announced to the pool as a publisher does."""
    if pool is not None:
        pool.close_gate(version)
    buckets = buckets_of(policy(version))
    fleet.begin(version)
    rounds = []
    while not rounds or rounds[-1] is Round.AGAIN:
        rounds.append(await asyncio.to_thread(fleet.round, buckets))
    if pool is not None:
        pool.open_gate(version, fleet.serving)
    return rounds


def with_pool(
    servers: list[Server],
    use: Callable[[EnginePool], Awaitable[None]],
    timeout_s: float = 300.0,
    settings: PoolSettings | None = None,
) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            generators = [
                await stack.enter_async_context(
                    Generator(server.settings.url, model_limits(server.settings))
                )
                for server in servers
            ]
            pool = EnginePool(generators, settings)
            await asyncio.wait_for(use(pool), timeout_s)
            await pool.close()

    asyncio.run(run())


def start(pool: EnginePool, num_requests: int, num_tokens: int) -> list[asyncio.Task[Completion]]:
    """Requests with one of three prompts, so that most find a prefix of another in the cache.

    A replay by spans agrees only if those that began after an update found none from before it.
    """
    sampling = SamplingSettings(max_new_tokens=num_tokens, ignore_eos=True)
    return [
        asyncio.create_task(pool.generate([1, *range(100, 108), 7 + next(prompts) % 3], sampling))
        for _ in range(num_requests)
    ]


def assert_sound(completion: Completion, num_tokens: int) -> None:
    """Whole, and every span's log-probabilities are those of its version."""
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.output_ids) == num_tokens
    assert_spans_cover(completion)
    policies = {span.version: policy(span.version) for span in completion.spans}
    assert max_error(completion, replay(completion, policies)) < TOLERANCE


def test_replicas_keep_every_request_through_updates_and_agree_with_their_versions(
    servers: list[Server], fleet: Fleet
) -> None:
    async def use(pool: EnginePool) -> None:
        before, *later = (next(versions) for _ in range(3))
        assert await update(fleet, before, pool) == [Round.DONE]
        requests = start(pool, 8, num_tokens=400)
        for version in later:
            await asyncio.sleep(0.3)
            assert await update(fleet, version, pool) == [Round.DONE]
            assert fleet.serving == [address.control_name for address in addresses(servers)]
        completions = await asyncio.gather(*requests)
        assert any(len(completion.spans) > 1 for completion in completions)
        for completion in completions:
            assert_sound(completion, 400)
        assert pool.num_retried == 0

    with_pool(servers, use)


def test_the_probe_on_every_replica_agrees_with_the_model(
    servers: list[Server], fleet: Fleet
) -> None:
    version = next(versions)
    asyncio.run(update(fleet, version))
    tokens = [1, *range(20, 80)]
    with torch.no_grad():
        logits = policy(version)(torch.tensor([tokens])).logits[0, :-1]
    ours = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    for _ in range(2):  # the second time the prefix is in the cache
        with closing(PendingProbe(fleet.serving_addresses, tokens, version)) as pending:
            gaps, errors = pending.gaps(ours)
        assert errors == [] and len(gaps) == 2
        assert all(gap.max < TOLERANCE for gap in gaps.values())
    assert probe_gap(ours, [x + 1 for x in ours]).mean == pytest.approx(1.0)


def test_a_bit_that_flips_on_the_wire_is_found_and_the_engine_never_serves(
    servers: list[Server], fleet: Fleet, plan: PlanKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, again = (next(versions) for _ in range(3))
    asyncio.run(update(fleet, good))
    broadcast, send = HostedGroup.broadcast, HostedGroup.send

    def damaged(data: Tensor) -> Tensor:
        data = data.clone()
        data[1000] ^= 1
        return data

    def broadcast_damaged(group: HostedGroup, data: Tensor, timeout_s: float) -> Any:
        return broadcast(group, damaged(data), timeout_s)

    def send_damaged(group: HostedGroup, pieces: Iterable[Any], timeout_s: float) -> Any:
        (number, data), *others = pieces
        return send(group, [(number, damaged(data)), *others], timeout_s)

    async def versions_held() -> list[int]:
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(EngineControl(s.settings.url)) for s in servers
            ]
            return [await engine.weight_version() for engine in engines]

    monkeypatch.setattr(HostedGroup, "broadcast", broadcast_damaged)
    monkeypatch.setattr(HostedGroup, "send", send_damaged)
    with sender_for(policy(0), plan) as sender:
        sender.connect(addresses(servers))
        with pytest.raises(UpdateFailed, match=f"version {bad}: bits differ .* model.") as failure:
            sender.send(buckets_of(policy(bad)), bad)
    assert {type(error) for error in failure.value.errors} == {EngineMismatch}
    assert len(failure.value.quarantined) == 2 and failure.value.updated == ()
    assert asyncio.run(versions_held()) == [good, good]
    monkeypatch.undo()
    fleet.connect()
    assert asyncio.run(update(fleet, again)) == [Round.DONE]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model.norm.weight": (65,)}, r"wrong shape: model.norm.weight \[65\]"),
        ({"lm_head.weight": None}, "missing, parameters that nothing would fill: lm_head.weight"),
        ({"model.layers.0.mlp.up_proj.weight": None}, "missing, .*gate_up_proj.weight"),
        ({"model.layers.2.mlp.up_proj.weight": (2, 2)}, "extra, .*layers.2.mlp.up_proj.weight"),
    ],
)
def test_a_manifest_that_does_not_fit_is_one_error_that_names_the_tensor(
    change: dict, why: str, servers: list[Server]
) -> None:
    shapes = {spec.name: spec.shape for spec in manifest(policy(0))} | change
    fits = {name: shape for name, shape in shapes.items() if shape is not None}
    sender = WeightSender(manifest_of(fits, torch.float32), backend="gloo")
    with sender, pytest.raises(UpdateFailed, match=f"compare manifest failed.*{why}"):
        sender.connect(addresses(servers))


def test_a_manifest_of_another_dtype_is_refused(servers: list[Server]) -> None:
    shapes = {spec.name: spec.shape for spec in manifest(policy(0))}
    sender = WeightSender(manifest_of(shapes, torch.bfloat16), backend="gloo")
    with sender, pytest.raises(UpdateFailed, match="is bfloat16, the engine holds float32"):
        sender.connect(addresses(servers))


def test_no_request_is_aborted_over_50_updates_under_load(
    servers: list[Server], fleet: Fleet
) -> None:
    """pytest -s -m slow tests/rollout/test_fleet_sglang.py -k 50_updates"""
    finished: list[Completion] = []

    async def keep_busy(pool: EnginePool, stop: asyncio.Event) -> None:
        while not stop.is_set():
            (request,) = start(pool, 1, num_tokens=200)
            finished.append(await request)

    async def use(pool: EnginePool) -> None:
        await update(fleet, next(versions), pool)
        stop = asyncio.Event()
        busy = [asyncio.create_task(keep_busy(pool, stop)) for _ in range(16)]
        for _ in range(50):
            await asyncio.sleep(0.2)  # requests also begin and end between updates
            assert await update(fleet, next(versions), pool) == [Round.DONE]
        stop.set()
        await asyncio.gather(*busy)
        assert pool.num_retried == 0

    with_pool(servers, use, timeout_s=1200.0)
    assert len(finished) >= 16
    for completion in finished:
        assert completion.finish_reason is FinishReason.LENGTH
        assert_spans_cover(completion)
    crossings = sum(len(completion.spans) - 1 for completion in finished)
    print(f"{len(finished)} requests finished, 0 aborted, {crossings} crossings of an update")
    for completion in finished[:8]:
        assert_sound(completion, 200)


def test_64_long_requests_across_5_updates_agree_with_their_versions(
    servers: list[Server], fleet: Fleet
) -> None:
    """pytest -s -m slow tests/rollout/test_fleet_sglang.py -k 64_long"""

    async def use(pool: EnginePool) -> None:
        await update(fleet, next(versions), pool)
        requests = start(pool, 64, num_tokens=500)
        for _ in range(5):
            await asyncio.sleep(1.0)
            assert await update(fleet, next(versions), pool) == [Round.DONE]
        completions = await asyncio.gather(*requests)
        assert pool.num_retried == 0
        for completion in completions:
            assert_sound(completion, 500)
        num_spans = sum(len(completion.spans) for completion in completions)
        print(f"64 requests of 500 tokens, {num_spans} spans")
        assert num_spans > 64

    with_pool(servers, use, timeout_s=900.0)


@pytest.mark.parametrize("plan", [PlanKind.DIRECT], indirect=True)
def test_a_killed_replica_loses_no_request_and_is_whole_again_after_its_restart(
    servers: list[Server], fleet: Fleet, start_server: Callable[..., Any]
) -> None:
    victim = servers[1]
    name = EngineAddress(victim.settings.url).control_name
    settings = PoolSettings(suspect_s=2.0, restart_s=900.0)

    async def use(pool: EnginePool) -> None:
        before, without, after = (next(versions) for _ in range(3))
        await update(fleet, before, pool)
        requests = start(pool, 8, num_tokens=300)
        await asyncio.sleep(0.5)
        victim.kill()
        for completion in await asyncio.gather(*requests):
            assert_sound(completion, 300)
        assert pool.num_retried > 0
        await update(fleet, without, pool)
        assert name not in fleet.serving and len(fleet.serving) == 1
        restarted = start_server(tp=victim.settings.tp, port=victim.settings.port)
        await asyncio.to_thread(restarted.__enter__)
        stack.callback(restarted.__exit__, None, None, None)
        while pool.statuses[name].state is not EngineState.STALE:
            await asyncio.sleep(0.1)
        await update(fleet, after, pool)
        assert name in fleet.serving and len(fleet.serving) == 2
        for completion in await asyncio.gather(*start(pool, 4, num_tokens=50)):
            assert {span.version for span in completion.spans} == {after}
            assert_sound(completion, 50)

    with ExitStack() as stack:
        with_pool(servers, use, timeout_s=1200.0, settings=settings)
