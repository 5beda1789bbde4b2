"""Supervised traces from an RL run: what Magistral Small starts from (section 5.3 of the paper).

Correct completions, without those of the first steps and without short ones; so many of a problem
at most, or the easy ones would be most of them; those of problems that are seldom solved more than
once; and a share of general instructions, for what is no reasoning.

Pure: rows in, rows out.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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
    samples: Sequence[Sample], pass_rates: Mapping[str, float], settings: SelectionSettings
) -> Selection:
    """The traces to imitate, by problem in the order of the samples. Deterministic by seed.

    `pass_rates` has a share for every problem of `samples`, or the samples themselves tell it.
    """
    counts: Counter[str] = Counter()
    found: dict[str, dict[str, Sample]] = defaultdict(dict)
    for sample in samples:
        fate = _fate(sample, found[sample.problem], settings)
        counts[fate] += 1
        if fate == KEPT:
            found[sample.problem][sample.response] = sample
    rates = sample_rates(samples) | dict(pass_rates)
    traces: list[Trace] = []
    copies = 0
    for problem, responses in found.items():
        chosen = _choose(problem, list(responses.values()), settings)
        counts[ABOVE_CAP] += len(responses) - len(chosen)
        times = settings.copies_of_hard if rates[problem] < settings.hard_below else 1
        copies += len(chosen) * (times - 1)
        traces += [Trace(s.problem, s.statement, s.response) for s in chosen for _ in range(times)]
    counts[KEPT] -= counts[ABOVE_CAP]
    return Selection(
        tuple(traces), {"samples": len(samples), **{f: counts[f] for f in FATES}, COPIES: copies}
    )


UNSOLVED, EARLY, SHORT, REPEATED = "not solved", "of an early step", "short", "repeated"
ABOVE_CAP, KEPT, COPIES = "beyond the cap of their problem", "kept", "copies of hard problems"
FATES = (UNSOLVED, EARLY, SHORT, REPEATED, ABOVE_CAP, KEPT)


def _fate(sample: Sample, before: Mapping[str, Sample], settings: SelectionSettings) -> str:
    if not sample.solved:
        return UNSOLVED
    if sample.step < settings.from_step:
        return EARLY
    if sample.num_tokens < settings.min_tokens:
        return SHORT
    return REPEATED if sample.response in before else KEPT


def _choose(problem: str, samples: list[Sample], settings: SelectionSettings) -> list[Sample]:
    """At most max_per_problem of them, at random, in their order."""
    if len(samples) <= settings.max_per_problem:
        return samples
    rng = random.Random(f"{settings.seed}/{problem}")
    places = sorted(rng.sample(range(len(samples)), settings.max_per_problem))
    return [samples[place] for place in places]


def sample_rates(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of the samples that were solved, by problem."""
    tried = Counter(sample.problem for sample in samples)
    solved = Counter(sample.problem for sample in samples if sample.solved)
    return {problem: solved[problem] / count for problem, count in tried.items()}


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
