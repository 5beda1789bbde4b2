"""The state of a run's prompt groups, replayed from the journal. Pure.

    ledger = Ledger()
    for event in events:
        ledger.apply(event)
    restored = ledger.restore(step, problems)

At a resume from step k everything is as it was when the journal ends, but for the steps from k on:
their batches are handed out again as they were, the same groups with the same tokens in the same
order. So trainers that compute the same numbers arrive at the same weights, tokens are as old as
their versions say, and generation goes on from there with what was unfinished.

Where the tokens of a step from k on are no longer kept (see `journal.py`), the run cannot be
repeated. Then groups that were admitted under weights newer than k are forgotten, and admitted
again in their turn; older ones that were not trained before k are sampled anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_magistral.rollout.events import (
    Admitted,
    AnyEvent,
    Began,
    Closed,
    Finished,
    How,
    Outcome,
    Rewarded,
    Sampled,
    Taken,
    Trained,
    unpack_ids,
    unpack_logprobs,
)
from megatron_magistral.types import (
    Completion,
    FinishReason,
    Graded,
    Group,
    Problem,
    Reward,
    Span,
)

BYTES_PER_TOKEN = 4  # of ids and of log-probabilities, as events pack them


class LedgerError(RuntimeError):
    """The journal contradicts itself, the trainers or the data; says how."""


@dataclass(frozen=True)
class Member:
    """How far one completion of a group is: tokens (reason ABORT until it has ended), reward."""

    completion: Completion | None = None
    reward: Reward | None = None

    @property
    def is_sampled(self) -> bool:
        return self.completion is not None and (
            self.completion.finish_reason is not FinishReason.ABORT
        )


@dataclass(frozen=True)
class OpenGroup:
    """A group that generators and verifiers have to work on. `prompt_ids` may be empty where no
    member has begun."""

    ordinal: int
    problem: Problem
    version: int
    due: int | None
    prompt_ids: tuple[int, ...]
    members: tuple[Member, ...]

    @property
    def num_unfinished(self) -> int:
        """Sequences that are not sampled to their end."""
        return sum(not member.is_sampled for member in self.members)


@dataclass(frozen=True)
class Restored:
    """Where the rollout goes on. `generate_from` is the version that must be reached first."""

    step: int
    how: How
    next_ordinal: int
    generate_from: int
    repeated: tuple[Callable[[], tuple[Group, ...]], ...]
    waiting: tuple[tuple[Group, int | None], ...]
    unfinished: tuple[OpenGroup, ...]
    outcomes: Counter[Outcome]


@dataclass
class _Member:
    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    spans: list[Span] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT
    text: str = ""
    reward: Reward | None = None

    @property
    def has_begun(self) -> bool:
        return bool(self.ids) or self.finish_reason is not FinishReason.ABORT

    def extend(self, event: Sampled) -> None:
        self.cut(event.start)
        self.ids += event.ids
        self.logprobs += event.logprobs
        start, end = event.start, len(self.ids) // BYTES_PER_TOKEN
        if self.spans and self.spans[-1].version == event.version:
            start = self.spans.pop().start
        self.spans.append(Span(event.version, start, end))

    def finish(self, event: Finished) -> None:
        self.cut(event.spans[-1].end if event.spans else 0)
        self.spans = list(event.spans)
        self.finish_reason, self.text = event.finish_reason, event.text

    def cut(self, num_tokens: int) -> None:
        """Keep the first tokens. Raises LedgerError if there are fewer."""
        num_there = len(self.ids) // BYTES_PER_TOKEN
        if num_tokens > num_there:
            raise LedgerError(f"a completion of {num_there} tokens goes on after {num_tokens}")
        if num_tokens == num_there:
            return
        del self.ids[num_tokens * BYTES_PER_TOKEN :]
        del self.logprobs[num_tokens * BYTES_PER_TOKEN :]
        kept = (span for span in self.spans if span.start < num_tokens)
        self.spans = [Span(s.version, s.start, min(s.end, num_tokens)) for s in kept]

    def completion(self, prompt_ids: tuple[int, ...]) -> Completion:
        return Completion(
            prompt_ids=prompt_ids,
            output_ids=unpack_ids(self.ids),
            logprobs=unpack_logprobs(self.logprobs),
            spans=tuple(self.spans),
            finish_reason=self.finish_reason,
            text=self.text,
        )


@dataclass
class _Group:
    admitted: Admitted
    members: dict[int, _Member] = field(default_factory=dict)
    outcome: Outcome | None = None

    @property
    def is_whole(self) -> bool:
        return all(self.member(i).reward is not None for i in range(self.admitted.size))

    def member(self, index: int) -> _Member:
        return self.members.setdefault(index, _Member())

    def start_again(self, version: int) -> None:
        self.members, self.outcome = {}, None
        self.admitted = self.admitted.again(version)


class Ledger:
    """Groups by ordinal, and which of them each step took."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._taken: dict[int, tuple[int, ...]] = {}
        self._version = 0  # newest that any token or admission is of

    def apply(self, event: AnyEvent) -> None:
        """Raises LedgerError if it cannot follow what came before."""
        match event:
            case Began():
                self._begin(event)
            case Admitted():
                self._admit(event)
            case Sampled():
                self._version = max(self._version, event.version)
                self._group(event.ordinal).member(event.member).extend(event)
            case Finished():
                self._group(event.ordinal).member(event.member).finish(event)
            case Rewarded():
                self._group(event.ordinal).member(event.member).reward = event.reward
            case Closed():
                self._group(event.ordinal).outcome = event.outcome
            case Taken():
                self._take(event)
            case Trained():
                pass  # a checkpoint says what is trained

    def restore(
        self, step: int, problems: Mapping[str, Problem], max_staleness: int | None = None
    ) -> Restored:
        """Where the rollout goes on when trainers go on with `step`, under the bound `rl` has now.

        Raises LedgerError if a step before it was never handed out, or a problem is not there.
        """
        if missing := [earlier for earlier in range(step) if earlier not in self._taken]:
            raise LedgerError(
                f"the trainers go on with step {step}, but the journal has no batch of step "
                f"{missing[0]}: it is missing, of another run, or has lost its end. It can go on "
                f"from checkpoints up to step {missing[0]} (`magistral resume RUN --step`)"
            )
        how = How.REPEATED if self._can_repeat(step) else How.ANEW
        self._begin(Began(step, how))
        taken = {ordinal for batch in self._taken.values() for ordinal in batch}
        left = {o: group for o, group in self._groups.items() if o not in taken}
        waiting = [g for g in left.values() if g.outcome is Outcome.TAKEN]
        unfinished = [g for g in left.values() if g.outcome is None]
        later = sorted(each for each in self._taken if each >= step)
        return Restored(
            step=step,
            how=how,
            next_ordinal=max(self._groups, default=-1) + 1,
            generate_from=max(step, self._version),
            repeated=tuple(self._batch_of(each, problems) for each in later),
            waiting=tuple(
                (_finished(g, problems), g.admitted.due_under(max_staleness)) for g in waiting
            ),
            unfinished=tuple(_open(g, problems, max_staleness) for g in unfinished),
            outcomes=self._outcomes(step),
        )

    def _outcomes(self, step: int) -> Counter[Outcome]:
        """How groups have left; those of steps from `step` on will leave again."""
        left = (group.outcome for group in self._groups.values())
        outcomes: Counter[Outcome] = Counter()
        outcomes.update(o for o in left if o in (Outcome.DROPPED, Outcome.FAILED))
        outcomes[Outcome.TAKEN] = sum(len(b) for s, b in self._taken.items() if s < step)
        return outcomes

    def _can_repeat(self, step: int) -> bool:
        """Whether the tokens of all batches from `step` on are kept."""
        return all(
            self._groups[ordinal].is_whole
            for later, batch in self._taken.items()
            if later >= step
            for ordinal in batch
        )

    def _begin(self, event: Began) -> None:
        if event.how is How.REPEATED:
            return
        self._taken = {step: batch for step, batch in self._taken.items() if step < event.step}
        taken = {ordinal for batch in self._taken.values() for ordinal in batch}
        for ordinal, group in list(self._groups.items()):
            if ordinal in taken:
                continue
            if group.admitted.version > event.step:
                del self._groups[ordinal]
            elif group.outcome not in (Outcome.DROPPED, Outcome.FAILED):
                group.start_again(event.step)
        self._version = event.step

    def _admit(self, event: Admitted) -> None:
        if event.ordinal in self._groups:
            raise LedgerError(f"group {event.ordinal} is admitted twice")
        self._groups[event.ordinal] = _Group(event)
        self._version = max(self._version, event.version)

    def _take(self, event: Taken) -> None:
        for ordinal in event.ordinals:
            self._group(ordinal)
        before = self._taken.setdefault(event.step, event.ordinals)
        if before != event.ordinals:
            raise LedgerError(
                f"step {event.step} took groups {list(before)}, and {list(event.ordinals)} when it "
                "was to be repeated"
            )

    def _group(self, ordinal: int) -> _Group:
        if ordinal not in self._groups:
            raise LedgerError(f"group {ordinal} was never admitted")
        return self._groups[ordinal]

    def _batch_of(
        self, step: int, problems: Mapping[str, Problem]
    ) -> Callable[[], tuple[Group, ...]]:
        """Makes the batch, and lets go of its tokens, when it is asked for."""
        groups = [self._groups[ordinal] for ordinal in self._taken[step]]
        for group in groups:
            _problem_of(group, problems)  # a missing one is an error now, not in an hour

        def batch() -> tuple[Group, ...]:
            made = tuple(_finished(group, problems) for group in groups)
            for group in groups:
                group.members = {}
            return made

        return batch


def _finished(group: _Group, problems: Mapping[str, Problem]) -> Group:
    members = []
    for index in range(group.admitted.size):
        member = group.member(index)
        assert member.reward is not None, "only whole groups are closed"
        members.append(Graded(member.completion(group.admitted.prompt_ids), member.reward))
    return Group(group.admitted.ordinal, _problem_of(group, problems), tuple(members))


def _open(group: _Group, problems: Mapping[str, Problem], max_staleness: int | None) -> OpenGroup:
    admitted = group.admitted
    return OpenGroup(
        ordinal=admitted.ordinal,
        problem=_problem_of(group, problems),
        version=admitted.version,
        due=admitted.due_under(max_staleness),
        prompt_ids=admitted.prompt_ids,
        members=tuple(
            Member(
                member.completion(admitted.prompt_ids) if member.has_begun else None, member.reward
            )
            for member in map(group.member, range(admitted.size))
        ),
    )


def _problem_of(group: _Group, problems: Mapping[str, Problem]) -> Problem:
    admitted = group.admitted
    if admitted.problem_id not in problems:
        raise LedgerError(
            f"group {admitted.ordinal} is of problem {admitted.problem_id!r}, which is not among "
            f"the {len(problems)} training problems: their files have changed since the run began"
        )
    return problems[admitted.problem_id]
