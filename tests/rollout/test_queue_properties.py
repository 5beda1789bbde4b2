"""The invariants of the bounded queue under random orders and failures, and for heavy tails."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from megatron_magistral.rollout.events import Admitted
from megatron_magistral.rollout.queue import Admission, GroupQueue, Outcome, QueueLimits
from megatron_magistral.types import Group
from tests.fakes import group_of
from tests.rollout.test_queue import SIZE, limits_of, queue_of


@dataclass
class Model:
    """A run with a queue at its centre: generators that finish in any order, a trainer, resumes."""

    limits: QueueLimits
    rng: random.Random
    step: int = 0
    is_training: bool = False
    generate_from: int = 0
    """Nothing is generated before generators hold this version again."""
    unfinished: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, Group] = field(default_factory=dict)
    admitted: dict[int, Admission] = field(default_factory=dict)
    left: Counter = field(default_factory=Counter)
    batches: list[tuple[Group, ...]] = field(default_factory=list)
    """Of every step that was taken, whatever was resumed since."""
    tasks: list[asyncio.Task] = field(default_factory=list)

    async def start(self) -> None:
        self.queue = GroupQueue(self.limits)
        await self._go_on()

    async def _go_on(self) -> None:
        await self.queue.weights_changed(self.step)
        self.taking = asyncio.create_task(self.queue.take())
        self.admitting = None
        self.tasks.append(self.taking)

    async def settle(self) -> None:
        """Admit all that may be admitted, take what may be taken."""
        while True:
            if self.admitting is None and self.generates:
                self.admitting = asyncio.create_task(self.queue.admit())
                self.tasks.append(self.admitting)
            for _ in range(4):
                await asyncio.sleep(0)
            if self.admitting is not None and self.admitting.done():
                admission = self.admitting.result()
                self.admitted[admission.ordinal] = admission
                self.unfinished[admission.ordinal] = SIZE
                self.admitting = None
            elif not self.is_training and self.taking.done():
                self._take(self.taking.result())
            else:
                return

    def _take(self, batch: tuple[Group, ...]) -> None:
        self.is_training = True
        if self.step < len(self.batches):
            assert batch == self.batches[self.step]  # repeated, and nothing else
            return
        self.batches.append(batch)
        for group in batch:
            del self.waiting[group.ordinal]
            self.left[group.ordinal] += 1

    async def finish_a_sequence(self) -> None:
        ordinal = self.rng.choice(sorted(o for o, n in self.unfinished.items() if n))
        self.unfinished[ordinal] -= 1
        await self.queue.sequence_done()

    async def close_a_group(self) -> None:
        ordinal = self.rng.choice(sorted(self.closable))
        del self.unfinished[ordinal]
        if self.rng.random() < 0.2:
            self.left[ordinal] += 1
            await self.queue.leave(ordinal, self.rng.choice([Outcome.DROPPED, Outcome.FAILED]))
        else:
            self.waiting[ordinal] = group_of(ordinal, size=SIZE)
            await self.queue.put(self.waiting[ordinal])

    async def end_step(self) -> None:
        self.step += 1
        self.is_training = False
        await self.queue.weights_changed(self.step)
        self.taking = asyncio.create_task(self.queue.take())
        self.tasks.append(self.taking)

    async def resume(self) -> None:
        """Everything is killed, and goes on from a step that was saved not long ago; now and then
        with another bound."""
        self.cancel()
        if self.rng.random() < 0.5:
            bound = self.rng.choice([None, *range(6)])
            self.limits = replace(self.limits, max_staleness=bound)
        self.generate_from = max(self.generate_from, self.step)
        self.step = self.rng.randrange(max(0, self.step - 3), self.step + 1)
        self.is_training = False
        self.queue = GroupQueue(self.limits)
        self.queue.restore(
            self.step,
            len(self.admitted),
            repeated=[lambda batch=batch: batch for batch in self.batches[self.step :]],
            waiting=[(group, self.due(o)) for o, group in self.waiting.items()],
            unfinished=[
                (replace(self.admitted[o], due=self.due(o)), count)
                for o, count in self.unfinished.items()
            ],
        )
        await self._go_on()

    def due(self, ordinal: int) -> int | None:
        """As the ledger tells it to a queue that goes on."""
        group = self.admitted[ordinal]
        recorded = Admitted(ordinal, "", SIZE, group.version, group.due, ())
        return recorded.due_under(self.limits.max_staleness)

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    @property
    def generates(self) -> bool:
        return self.step >= self.generate_from

    @property
    def closable(self) -> list[int]:
        return [o for o, n in self.unfinished.items() if n == 0]

    def moves(self) -> list:
        moves = [self.end_step] if self.is_training else []
        if self.generates:
            moves += [self.finish_a_sequence] if any(self.unfinished.values()) else []
            moves += [self.close_a_group] if self.closable else []
        return moves


@st.composite
def runs(draw) -> tuple[QueueLimits, int]:
    groups_per_batch = draw(st.integers(1, 4))
    n_async = SIZE * draw(st.integers(1, 12))
    enough = max(1, groups_per_batch - n_async // SIZE)
    capacity = SIZE * draw(st.integers(enough, enough + 8))
    bound = draw(st.none() | st.integers(0, 5))
    limits = limits_of(
        n_async=n_async,
        capacity=capacity,
        groups_per_batch=groups_per_batch,
        max_staleness=bound,
        max_barren_groups=10_000,
    )
    return limits, draw(st.integers(0, 2**32))


@settings(max_examples=80, deadline=None)
@given(runs())
def test_in_any_order_nothing_is_lost_or_too_old_and_the_run_goes_on(run):
    limits, seed = run

    async def scenario() -> None:
        model = Model(limits, random.Random(seed))
        await model.start()
        for _ in range(300):
            await model.settle()
            if model.generates:
                check_admission(model)
            moves = model.moves()
            assert moves, f"nobody can do anything: {model.queue.describe()}"
            is_killed = model.rng.random() < 0.02
            await (model.resume if is_killed else model.rng.choice(moves))()
        model.cancel()
        check_history(model)

    asyncio.run(scenario())


def check_admission(model: Model) -> None:
    """n_async is kept, and it is kept full unless a bound forbids one group more."""
    limits, queue = model.limits, model.queue
    assert queue.num_in_flight == sum(model.unfinished.values()) <= limits.n_async
    outstanding = (len(model.unfinished) + len(model.waiting)) * SIZE
    assert outstanding <= limits.n_async + limits.capacity
    full = queue.num_in_flight + SIZE > limits.n_async
    held_back = outstanding + SIZE > limits.n_async + limits.capacity
    if limits.max_staleness is not None:
        last = len(model.batches) + outstanding // SIZE // limits.groups_per_batch
        held_back |= last > model.step + limits.max_staleness
    assert full or held_back


def check_history(model: Model) -> None:
    assert set(model.left.values()) <= {1}
    assert sorted(model.admitted) == list(range(len(model.admitted)))
    places = [*model.left, *model.unfinished, *model.waiting]
    assert sorted(places) == sorted(model.admitted)
    for step, batch in enumerate(model.batches):
        assert len(batch) == model.limits.groups_per_batch
        for group in batch:
            due = model.admitted[group.ordinal].due
            assert due is None or step <= due


# --- the lengths that are trained --------------------------------------------------------------

N_BATCH = 32
HEAVY_TAILS = {
    "lognormal": lambda rng: rng.lognormvariate(0.0, 1.0),
    "pareto_cut": lambda rng: min(rng.paretovariate(1.2), 100.0),
}


class Clock:
    """Simulated time: the earliest sleeper goes on when nobody else can."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._count = 0

    async def sleep(self, duration: float) -> None:
        self._count += 1
        sleeper = (self.now + duration, self._count, asyncio.Event())
        self._sleepers.append(sleeper)
        await sleeper[2].wait()

    async def run(self, until: asyncio.Event) -> None:
        while not until.is_set():
            for _ in range(6):
                await asyncio.sleep(0)
            if self._sleepers:
                heapq.heapify(self._sleepers)
                self.now, _, woken = heapq.heappop(self._sleepers)
                woken.set()


async def trained_lengths(ratio: int, bound: int | None, tail: str, num_steps: int) -> list[float]:
    """Lengths of the completions of each step, after the first ones; groups of SIZE."""
    rng, clock, done = random.Random(f"{ratio}/{bound}/{tail}"), Clock(), asyncio.Event()
    queue = await queue_of(
        n_async=ratio * N_BATCH,
        capacity=N_BATCH,
        groups_per_batch=N_BATCH // SIZE,
        max_staleness=bound,
    )
    lengths: dict[int, list[float]] = {}
    trained: list[float] = []

    async def roll_out(ordinal: int) -> None:
        async def sample(length: float) -> None:
            await clock.sleep(length)
            await queue.sequence_done()

        await asyncio.gather(*map(sample, lengths[ordinal]))
        await queue.put(group_of(ordinal, size=SIZE))

    async def generate() -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                ordinal = (await queue.admit()).ordinal
                lengths[ordinal] = [HEAVY_TAILS[tail](rng) for _ in range(SIZE)]
                groups.create_task(roll_out(ordinal))

    async def train() -> None:
        for step in range(num_steps):
            groups = await queue.take()
            if step >= 20:
                trained.extend(length for g in groups for length in lengths[g.ordinal])
            await clock.sleep(0.5)
            await queue.weights_changed(step + 1)
        done.set()

    generating = asyncio.create_task(generate())
    training = asyncio.create_task(train())
    await clock.run(done)
    await training
    generating.cancel()
    return trained


@pytest.mark.parametrize("is_bounded", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("tail", HEAVY_TAILS)
def test_the_lengths_trained_on_follow_the_lengths_sampled(tail, ratio, is_bounded):
    bound = ratio + 1 if is_bounded else None
    trained = asyncio.run(trained_lengths(ratio, bound, tail, num_steps=80))
    rng = random.Random("independent")
    sampled = [HEAVY_TAILS[tail](rng) for _ in range(50_000)]
    assert ks_2samp(trained, sampled).pvalue > 0.01
