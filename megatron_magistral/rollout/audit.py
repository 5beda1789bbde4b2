"""What became of every prompt group of a run, and whether that can be. Pure.

Each group that was admitted is trained in exactly one step, dropped, failed, or still open at the
end. A resume may repeat steps, or take them back; what counts is the history that remained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from enum import StrEnum

from megatron_magistral.rollout.events import (
    Admitted,
    AnyEvent,
    Began,
    Closed,
    How,
    Outcome,
    Taken,
    Trained,
)


class Fate(StrEnum):
    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"
    OPEN = "open"


class Violation(StrEnum):
    TRAINED_TWICE = "trained twice"
    LOST = "lost"
    """Never admitted although later ones were, or taken for a step that was never trained."""
    MISSING = "missing"
    """A step that was trained on groups that the journal does not name."""
    UNFIT = "unfit"
    """Trained although it was dropped, failed, or not graded whole."""
    TOO_OLD = "too old"
    """Trained after the step that it was due in, or with tokens from before its admission."""
    TOO_NEW = "too new"
    """Trained with tokens of weights that there were not yet."""


@dataclass(frozen=True)
class Finding:
    violation: Violation
    detail: str

    def __str__(self) -> str:
        return f"{self.violation}: {self.detail}"


@dataclass(frozen=True)
class Row:
    """One group. `step` trained it; `oldest` and `newest` are the versions of its tokens."""

    ordinal: int
    problem_id: str
    fate: Fate
    reason: str
    step: int | None
    version: int
    oldest: int
    newest: int
    num_tokens: int


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    num_steps: int
    num_begun: int
    """How often trainers began, which is once more than the run was resumed."""

    def count(self, fate: Fate) -> int:
        return sum(row.fate is fate for row in self.rows)


@dataclass
class _History:
    admitted: dict[int, Admitted] = field(default_factory=dict)
    closed: dict[int, Closed] = field(default_factory=dict)
    taken: dict[int, tuple[int, ...]] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    num_begun: int = 0

    def apply(self, event: AnyEvent) -> None:
        match event:
            case Began():
                self._begin(event)
            case Admitted():
                self.admitted[event.ordinal] = event
            case Closed():
                self.closed[event.ordinal] = event
            case Taken():
                self.taken[event.step] = event.ordinals
            case Trained():
                self.trained.add(event.step)

    def _begin(self, event: Began) -> None:
        self.num_begun += 1
        self.trained = set(range(event.step))  # so the trainers' checkpoint says
        if event.how is How.REPEATED:
            return
        self.taken = {step: batch for step, batch in self.taken.items() if step < event.step}
        taken = {ordinal for batch in self.taken.values() for ordinal in batch}
        for ordinal, admitted in list(self.admitted.items()):
            if ordinal in taken:
                continue
            if admitted.version > event.step:
                del self.admitted[ordinal]
                self.closed.pop(ordinal, None)
            elif ordinal not in self.closed or self.closed[ordinal].outcome is Outcome.TAKEN:
                self.closed.pop(ordinal, None)
                self.admitted[ordinal] = admitted.again(event.step)


def audit(
    events: Iterable[AnyEvent], *, recorded_steps: Set[int] = frozenset(), has_ended: bool = False
) -> Report:
    """`recorded_steps` are those that the run's metrics tell of, `has_ended` whether no step can
    follow."""
    history = _History()
    for event in events:
        history.apply(event)
    findings = [
        *_steps(history, recorded_steps, has_ended),
        *_groups(history),
    ]
    rows = tuple(_rows(history))
    return Report(rows, tuple(findings), len(history.trained), history.num_begun)


def _steps(history: _History, recorded_steps: Set[int], has_ended: bool) -> Iterator[Finding]:
    for step in sorted(history.trained | recorded_steps):
        if step not in history.taken:
            detail = f"step {step} was trained on a batch that the journal does not name"
            yield Finding(Violation.MISSING, detail)
    if has_ended:
        for step in sorted(history.taken.keys() - history.trained):
            batch = ", ".join(map(str, history.taken[step]))
            detail = f"groups {batch} were taken for step {step}, which was never trained"
            yield Finding(Violation.LOST, detail)


def _groups(history: _History) -> Iterator[Finding]:
    trained = [
        (ordinal, step)
        for step in sorted(history.trained)
        for ordinal in history.taken.get(step, ())
    ]
    for ordinal, times in sorted(Counter(ordinal for ordinal, _ in trained).items()):
        if times > 1:
            steps = ", ".join(str(step) for each, step in trained if each == ordinal)
            yield Finding(Violation.TRAINED_TWICE, f"group {ordinal} in steps {steps}")
    known = history.admitted.keys() | {ordinal for ordinal, _ in trained}
    for ordinal in sorted(set(range(max(known, default=-1) + 1)) - history.admitted.keys()):
        yield Finding(Violation.LOST, f"group {ordinal} was never admitted")
    for ordinal, step in trained:
        closed = history.closed.get(ordinal)
        if closed is None or closed.outcome is not Outcome.TAKEN:
            was = "not graded whole" if closed is None else closed.outcome.value
            yield Finding(Violation.UNFIT, f"group {ordinal} was {was}, and trained in step {step}")
        admitted = history.admitted.get(ordinal)
        if admitted is not None and admitted.due is not None and step > admitted.due:
            detail = f"group {ordinal} was due in step {admitted.due}, and trained in step {step}"
            yield Finding(Violation.TOO_OLD, detail)
        if admitted is not None and closed is not None and closed.versions[0] >= 0:
            yield from _tokens(admitted, closed, step)


def _tokens(admitted: Admitted, closed: Closed, step: int) -> Iterator[Finding]:
    """Weights that sampled a group are those of its admission or later ones, up to those that were
    trained when it was its turn."""
    oldest, newest = closed.versions
    has = f"group {closed.ordinal} has tokens of version"
    if oldest < admitted.version:
        detail = f"{has} {oldest}, and was admitted under version {admitted.version}"
        yield Finding(Violation.TOO_OLD, detail)
    if newest > step:
        yield Finding(Violation.TOO_NEW, f"{has} {newest}, and was trained in step {step}")


def _rows(history: _History) -> Iterator[Row]:
    steps = {
        ordinal: step
        for step, batch in history.taken.items()
        if step in history.trained
        for ordinal in batch
    }
    for ordinal, admitted in sorted(history.admitted.items()):
        closed = history.closed.get(ordinal)
        fate = Fate.TRAINED if ordinal in steps else Fate.OPEN
        if ordinal not in steps and closed is not None and closed.outcome is not Outcome.TAKEN:
            fate = Fate(closed.outcome.value)
        oldest, newest = closed.versions if closed else (-1, -1)
        yield Row(
            ordinal=ordinal,
            problem_id=admitted.problem_id,
            fate=fate,
            reason=closed.reason if closed else "",
            step=steps.get(ordinal),
            version=admitted.version,
            oldest=oldest,
            newest=newest,
            num_tokens=closed.num_tokens if closed else 0,
        )
