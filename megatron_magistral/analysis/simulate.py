"""A discrete-event model of the rollout pipeline: lengths, staleness, speed and what stands idle.

    admit -> running -> verified -> waiting -> taken by the trainer -> new weights
                                 \\-> dropped      \\-> discarded (a baseline)

Admission is that of the bounded queue: at most `n_async` completions in flight, and at most
`n_async + queue_capacity` admitted but not yet taken. Every trained batch is a new policy version
(section 3 of arXiv 2506.10910). Synchronous and one-step-off training are the same pipeline with
other limits: see `pipeline_model.in_mode`.

All running completions advance alike, at a rate that depends on how many they are: generators are
taken to be equally loaded, which choosing the least loaded one for every request comes close to.
So one number, the tokens that a completion would have got had it run all the time, places every
event, and a run costs O(log n) for each completion.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from megatron_magistral.analysis.pipeline_model import (
    Handover,
    SampleLength,
    Settings,
    SimulatedGroup,
    Speeds,
    Step,
    Totals,
    Trace,
)


class Stuck(RuntimeError):
    """Nothing can happen any more, and not every step is trained."""


def simulate(
    settings: Settings,
    sample_length: SampleLength,
    speeds: Speeds | None = None,
    *,
    num_steps: int,
    seed: int,
) -> Trace:
    """Runs until `num_steps` batches are trained. Deterministic by seed."""
    run = _Run(settings, speeds or Speeds(), sample_length, random.Random(seed))
    while len(run.steps) < num_steps:
        run.admit()
        if not run.take():  # what it takes makes room: admit at this very moment
            run.advance()
    return Trace(
        settings,
        tuple(run.steps),
        tuple(run.starts),
        tuple(run.lengths),
        tuple(run.updates),
        run.peak_kv_tokens,
    )


class _Phase(Enum):
    """What the trainer does; PAUSES is the end of sending."""

    WAITS = auto()
    TRAINS = auto()
    SENDS = auto()
    PAUSES = auto()


@dataclass
class _Run:
    settings: Settings
    speeds: Speeds
    sample_length: SampleLength
    rng: random.Random

    clock: float = 0.0
    progress: float = 0.0
    version: int = 0
    phase: _Phase = _Phase.WAITS
    phase_ends: float = math.inf
    batch: list[int] = field(default_factory=list)
    """Ordinals of the groups that are being trained."""
    num_taken: int = 0
    """Batches."""

    running: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (progress at the end, completion)."""
    backlog: deque[int] = field(default_factory=deque)
    """Completions that wait in a generator."""
    num_in_flight: int = 0
    """Completions that run or wait in a generator."""
    unfinished: dict[int, int] = field(default_factory=dict)
    """Completions that are not sampled yet, of every group in flight."""
    graded_at: dict[int, float] = field(default_factory=dict)
    verifying: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (time, group) of what is sampled and not graded."""
    verifier_free: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Heap of groups, the oldest first."""
    num_open: int = 0
    """Groups in flight or being graded."""
    untaken: Counter[int] = field(default_factory=Counter)
    """Groups that are neither taken nor dropped, by version."""
    sum_starts: float = 0.0
    stall_s: float = 0.0
    """For so long generators are at prompts before they go on."""
    totals: Totals = field(default_factory=Totals)
    peak_kv_tokens: float = 0.0

    versions: list[int] = field(default_factory=list)
    """Of each group, at its admission."""
    starts: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verifier_free = [0.0] * (self.speeds.num_verifiers or 0)
        self.max_running = len(self.speeds.rates) - 1 if self.speeds.rates else math.inf

    # --- admission ------------------------------------------------------------------------------

    def admit(self) -> None:
        """New groups while there is room; their completions run or wait in a generator."""
        settings, size = self.settings, self.settings.group_size
        limit = settings.n_async + settings.queue_capacity
        while (
            self.num_in_flight + size <= settings.n_async
            and (self.num_open + len(self.waiting) + 1) * size <= limit
            and self._new_one_is_in_time()
        ):
            ordinal = len(self.versions)
            self.versions.append(self.version)
            self.untaken[self.version] += 1
            self.unfinished[ordinal] = size
            self.num_open += 1
            self.num_in_flight += size
            for completion in range(ordinal * size, (ordinal + 1) * size):
                self.lengths.append(self.sample_length(self.rng))
                self.starts.append(math.nan)
                if len(self.running) < self.max_running:
                    self._start(completion)
                else:
                    self.backlog.append(completion)

    def _new_one_is_in_time(self) -> bool:
        """It is due last: the batch that it falls into, counted from the next, must not be late."""
        if self.settings.handover is not Handover.BOUNDED:
            return True
        num_before = self.num_open + len(self.waiting)
        num_batches = num_before * self.settings.group_size // self.settings.n_batch
        return self.version + self.settings.max_staleness >= self.num_taken + num_batches

    def _start(self, completion: int) -> None:
        self.starts[completion] = self.progress
        self.stall_s += self.speeds.start_s
        self.sum_starts += self.progress
        heapq.heappush(self.running, (self.progress + self.lengths[completion], completion))

    # --- the trainer ----------------------------------------------------------------------------

    def take(self) -> bool:
        """Begin to train the groups of the next step; False if the trainer has to wait or works."""
        if self.phase is not _Phase.WAITS:
            return False
        num_groups = self.settings.n_batch // self.settings.group_size
        oldest = self.version - self.settings.max_staleness
        if self.settings.handover is Handover.DISCARD_STALE:
            self._discard(oldest)
        if len(self.waiting) < num_groups:
            return False
        ordinals = heapq.nsmallest(num_groups, self.waiting)
        if self.settings.handover is Handover.BOUNDED and not self._leaves_in_time(
            ordinals, oldest, num_groups
        ):
            return False
        for _ in ordinals:
            heapq.heappop(self.waiting)
        self.untaken.subtract(self.versions[ordinal] for ordinal in ordinals)
        self.batch = ordinals
        self.num_taken += 1
        size = self.settings.group_size
        num_tokens = self.settings.n_batch * self.speeds.prompt_tokens + sum(
            length
            for ordinal in ordinals
            for length in self.lengths[ordinal * size : (ordinal + 1) * size]
        )
        seconds = self.speeds.train_s + num_tokens / self.speeds.train_tokens_per_s
        self.phase, self.phase_ends = _Phase.TRAINS, self.clock + seconds
        return True

    def _discard(self, oldest: int) -> None:
        late = {ordinal for ordinal in self.waiting if self.versions[ordinal] < oldest}
        self.untaken.subtract(self.versions[ordinal] for ordinal in late)
        self.waiting = [ordinal for ordinal in self.waiting if ordinal not in late]
        heapq.heapify(self.waiting)

    def _leaves_in_time(self, taken: list[int], oldest: int, num_groups: int) -> bool:
        """Whether those left after this step can all be trained within the bound, oldest first.

        Groups of version `oldest` are due in this step, those of the next version one step later.
        """
        left = self.untaken.copy()
        left.subtract(self.versions[ordinal] for ordinal in taken)
        num_due = 0
        for version in sorted(left):
            num_due += left[version]
            if num_due > max(0, version - oldest) * num_groups:
                return False
        return True

    def _end_phase(self) -> None:
        speeds = self.speeds
        match self.phase:
            case _Phase.TRAINS:
                self.phase, seconds = _Phase.SENDS, speeds.update_s - speeds.pause_s
            case _Phase.SENDS:
                self.phase, seconds = _Phase.PAUSES, speeds.pause_s
            case _:
                self._finish_step()
                self.phase, seconds = _Phase.WAITS, math.inf
        self.phase_ends = self.clock + seconds

    def _finish_step(self) -> None:
        size = self.settings.group_size
        groups = tuple(
            SimulatedGroup(
                ordinal,
                self.versions[ordinal],
                tuple(self.lengths[ordinal * size : (ordinal + 1) * size]),
            )
            for ordinal in self.batch
        )
        staleness = tuple(self.version - group.version for group in groups)
        totals = replace(self.totals)  # a copy
        self.steps.append(Step(self.clock, self.version, groups, staleness, totals))
        self.version += 1
        self.updates.append(self.progress)
        self.untaken = +self.untaken  # forget versions of which nothing is left

    # --- time -----------------------------------------------------------------------------------

    def advance(self) -> None:
        """To the next event, and do what happens then."""
        rate = 0.0
        sampled_at = math.inf
        if self.running and self.phase is not _Phase.PAUSES:
            rates = self.speeds.rates
            rate = rates[len(self.running)] if rates else 1.0
            left = max(0.0, self.running[0][0] - self.progress)
            sampled_at = self.clock + self.stall_s + left / rate
        graded_at = self.verifying[0][0] if self.verifying else math.inf
        now = min(sampled_at, graded_at, self.phase_ends)
        if now == math.inf:
            raise Stuck(f"no event after {self.clock:.0f} s, {len(self.steps)} steps are trained")
        self._pass(now, rate)
        if now == self.phase_ends:
            self._end_phase()
        elif now == graded_at:
            self._close(heapq.heappop(self.verifying)[1])
        else:
            self.progress = self.running[0][0]  # exactly, whatever the clock was rounded to
            self._sampled(heapq.heappop(self.running)[1])

    def _pass(self, now: float, rate: float) -> None:
        """Let time go by until `now`; nothing happens meanwhile."""
        seconds, count = now - self.clock, len(self.running)
        self.clock = now
        if seconds <= 0:
            return
        # A cache holds the prompt and the progress since the start, summed over what runs.
        before = count * (self.speeds.prompt_tokens + self.progress) - self.sum_starts
        stalled = min(self.stall_s, seconds) if rate else 0.0
        self.stall_s -= stalled
        self.progress += rate * (seconds - stalled)
        after = before + count * rate * (seconds - stalled)
        if after > self.peak_kv_tokens:
            self.peak_kv_tokens = after
        totals = self.totals
        totals.running += count * seconds
        totals.kv_tokens += (before + after) / 2 * seconds
        totals.waiting += len(self.waiting) * self.settings.group_size * seconds
        totals.generated += after - before
        if self.phase is _Phase.PAUSES:
            totals.paused += seconds
        elif not rate:
            totals.idle += seconds
        if self.phase is not _Phase.WAITS:
            totals.training += seconds

    def _sampled(self, completion: int) -> None:
        """A completion leaves the generators; its group, after its last one, the verifiers too."""
        self.sum_starts -= self.starts[completion]
        self.num_in_flight -= 1
        if self.backlog:
            self._start(self.backlog.popleft())
        ordinal = completion // self.settings.group_size
        graded_at = max(self.graded_at.get(ordinal, 0.0), self._verify())
        self.unfinished[ordinal] -= 1
        if self.unfinished[ordinal]:
            self.graded_at[ordinal] = graded_at
            return
        del self.unfinished[ordinal]
        self.graded_at.pop(ordinal, None)
        if graded_at > self.clock:
            heapq.heappush(self.verifying, (graded_at, ordinal))
        else:
            self._close(ordinal)

    def _verify(self) -> float:
        """When the verifiers, who take what comes in its order, are done with what came now."""
        seconds = self.speeds.verify_s
        if not seconds:
            return self.clock
        self.totals.verifying += seconds
        if not self.verifier_free:
            return self.clock + seconds
        done_at = max(self.clock, self.verifier_free[0]) + seconds
        heapq.heapreplace(self.verifier_free, done_at)
        return done_at

    def _close(self, ordinal: int) -> None:
        """A group is graded: it waits for the trainer, or is dropped."""
        self.num_open -= 1
        if self.settings.drop_share and self.rng.random() < self.settings.drop_share:
            self.untaken[self.versions[ordinal]] -= 1
            return
        heapq.heappush(self.waiting, ordinal)
