"""Supervised traces from an RL run: what Magistral Small starts from (section 5.3 of the paper).

Correct completions, without those of the first steps and without short ones; so many of a problem
at most, or the easy ones would be most of them; those of problems that are seldom solved more than
once; and a share of general instructions, for what is no reasoning.

Pure: rows in, rows out.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from megatron_magistral.types import Trace


class Sample(msgspec.Struct, frozen=True):
    """A line of a run's samples.jsonl, as far as it matters here."""

    step: int
    problem: str
    statement: str
    response: str
    solved: bool
    spans: tuple[tuple[int, int, int], ...]
    """(policy version, first token, last token + 1)."""

    @property
    def num_tokens(self) -> int:
        """Of the completion."""
        return self.spans[-1][2] if self.spans else 0


class Instruction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An example that is no reasoning: the whole prompt as the model is to see it, a response."""

    prompt: str
    response: str


@dataclass(frozen=True)
class SelectionSettings:
    """Raises ValueError for a value out of range, naming it."""

    from_step: int = 0
    """Completions that were trained before this step are left out."""
    min_tokens: int = 0
    max_per_problem: int = 4
    """Different traces of one problem."""
    hard_below: float = 0.25
    """A problem that is solved in a smaller share of its completions is hard."""
    copies_of_hard: int = 2
    """Times that each trace of a hard problem is given."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require("from_step", self.from_step, "at least 0", self.from_step >= 0)
        _require("min_tokens", self.min_tokens, "at least 0", self.min_tokens >= 0)
        _require("max_per_problem", self.max_per_problem, "at least 1", self.max_per_problem >= 1)
        _require("hard_below", self.hard_below, "in [0, 1]", 0 <= self.hard_below <= 1)
        _require("copies_of_hard", self.copies_of_hard, "at least 1", self.copies_of_hard >= 1)


@dataclass(frozen=True)
class Selection:
    """`counts` says what became of the samples, in the order in which it was decided."""

    traces: tuple[Trace, ...]
    counts: dict[str, int]


def select_traces(
    samples: Iterable[Sample], pass_rates: Mapping[str, float], settings: SelectionSettings
) -> Selection:
    """The traces to imitate, by problem in the order of the samples. Deterministic by seed.

    Samples are looked at once, and only those are kept that may become traces: a run has more of
    them than fit into memory. `pass_rates` has a share for every problem of `samples`, or the
    samples themselves tell it.
    """
    counts: Counter[str] = Counter()
    tried, solved = Counter[str](), Counter[str]()
    found: dict[str, _Kept] = defaultdict(lambda: _Kept(settings.max_per_problem))
    for order, sample in enumerate(samples):
        tried[sample.problem] += 1
        solved[sample.problem] += sample.solved
        fate = _fate(sample, settings)
        if fate == KEPT:
            rank = _rank(sample, settings.seed)
            fate = found[sample.problem].offer(rank, order, sample)
        counts[fate] += 1
    traces: list[Trace] = []
    copies = 0
    for problem, kept in found.items():
        chosen = kept.chosen()
        counts[KEPT] += len(chosen)
        counts[ABOVE_CAP] += kept.num_different - len(chosen)
        rate = pass_rates.get(problem, solved[problem] / tried[problem])
        times = settings.copies_of_hard if rate < settings.hard_below else 1
        copies += len(chosen) * (times - 1)
        traces += [Trace(s.problem, s.statement, s.response) for s in chosen for _ in range(times)]
    fates = {fate: counts[fate] for fate in FATES}
    return Selection(tuple(traces), {"samples": tried.total(), **fates, COPIES: copies})


UNSOLVED, EARLY, SHORT, REPEATED = "not solved", "of an early step", "short", "repeated"
ABOVE_CAP, KEPT, COPIES = "beyond the cap of their problem", "kept", "copies of hard problems"
FATES = (UNSOLVED, EARLY, SHORT, REPEATED, ABOVE_CAP, KEPT)
OFFERED = "offered"  # whether it is kept is known at the end


def _fate(sample: Sample, settings: SelectionSettings) -> str:
    if not sample.solved:
        return UNSOLVED
    if sample.step < settings.from_step:
        return EARLY
    return SHORT if sample.num_tokens < settings.min_tokens else KEPT


def _rank(sample: Sample, seed: int) -> bytes:
    """A random number that is a function of the response, so that equal ones have the same."""
    text = f"{seed}/{sample.problem}/{sample.response}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


class _Kept:
    """Of the different responses to one problem, `most` at random: those of the highest ranks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ranks: set[bytes] = set()
        self._heap: list[tuple[bytes, int, Sample]] = []

    @property
    def num_different(self) -> int:
        return len(self._ranks)

    def offer(self, rank: bytes, order: int, sample: Sample) -> str:
        if rank in self._ranks:
            return REPEATED
        self._ranks.add(rank)
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, (rank, order, sample))
        else:
            heapq.heappushpop(self._heap, (rank, order, sample))
        return OFFERED

    def chosen(self) -> list[Sample]:
        """In the order in which they were offered."""
        return [sample for _, _, sample in sorted(self._heap, key=lambda item: item[1])]


def mix(
    traces: Sequence[Trace], instructions: Sequence[Instruction], share: float, seed: int
) -> tuple[Trace, ...]:
    """`traces` and so many of the instructions that they are `share` of the whole, shuffled.

    Raises ValueError if there are not enough, or if `share` is not in [0, 1).
    """
    _require("general_share", share, "at least 0 and less than 1", 0 <= share < 1)
    count = round(share / (1 - share) * len(traces))
    if count > len(instructions):
        raise ValueError(
            f"general_share = {share:g}: {len(traces)} traces need {count} general instructions, "
            f"and there are {len(instructions)}"
        )
    rng = random.Random(seed)
    general = [
        Trace(problem_id="", statement="", response=item.response, prompt=item.prompt)
        for item in rng.sample(instructions, count)
    ]
    rows = [*traces, *general]
    rng.shuffle(rows)
    return tuple(rows)


def _require(name: str, value: object, rule: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} = {value}: must be {rule}")
