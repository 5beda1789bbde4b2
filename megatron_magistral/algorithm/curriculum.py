"""When the next stage of a run begins (arXiv 2506.10910, section 5.2).

The paper's stages keep three things true: the data is not too easy, completions keep growing, and
the KV cache stays affordable. Each has a sign that it is about to fail, and a rule for that sign:

    REWARD_PLATEAU   the mean reward has stopped to grow: the problems are learned, or too hard
    NEAR_L_MAX       too many completions end in the zone of the length penalty: they need room
    DROPPED_GROUPS   too many groups are all right or all wrong: the problems are too easy or hard
    STEP             the stage has lasted as long as it was given

Values in, decision out. A rule sees the steps of its own stage alone, and only whole windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Rule(StrEnum):
    """Why a stage begins. NONE: no rule holds, the present stage goes on."""

    NONE = "none"
    REWARD_PLATEAU = "reward plateau"
    NEAR_L_MAX = "near l_max"
    DROPPED_GROUPS = "dropped groups"
    STEP = "step"


class StepTally(msgspec.Struct, frozen=True, tag="step"):
    """Counts of what was rolled out between two steps. Sums, so that a window is their sum and a
    step in which nothing finished weighs nothing."""

    step: int
    num_completions: int
    """Completions that were graded."""
    reward_sum: float
    num_near_l_max: int
    """Of them, those with more than l_max - l_cache tokens."""
    num_groups: int
    num_dropped: int
    """Groups whose rewards were all equal."""


@dataclass(frozen=True)
class Rules:
    """The bounds of one stage; None switches a rule off. `window` and the like are steps."""

    min_steps: int = 1
    window: int = 20
    max_steps: int | None = None
    min_reward_gain: float | None = None
    """Least growth of the mean reward from one window to the next."""
    max_near_l_max: float | None = None
    max_dropped_groups: float | None = None


@dataclass(frozen=True)
class Decision:
    """`reason` has the numbers that decided, for the log."""

    rule: Rule
    reason: str = ""


STAY = Decision(Rule.NONE)


def decide(steps: Sequence[StepTally], rules: Rules) -> Decision:
    """Whether the stage that trained `steps`, in order, is to end now, and why.

    The first rule that holds is given, in the order of `Rule`.
    """
    if len(steps) < rules.min_steps:
        return STAY
    for rule in (_reward_plateau, _near_l_max, _dropped_groups, _step):
        decision = rule(steps, rules)
        if decision.rule is not Rule.NONE:
            return decision
    return STAY


def _reward_plateau(steps: Sequence[StepTally], rules: Rules) -> Decision:
    if rules.min_reward_gain is None or len(steps) < 2 * rules.window:
        return STAY
    earlier, latest = steps[-2 * rules.window : -rules.window], steps[-rules.window :]
    before, now = _mean_reward(earlier), _mean_reward(latest)
    if before is None or now is None or now - before >= rules.min_reward_gain:
        return STAY
    return Decision(
        Rule.REWARD_PLATEAU,
        f"mean reward {before:.4f} in {_span(earlier)} and {now:.4f} in {_span(latest)}: grew by "
        f"{now - before:.4f}, less than {rules.min_reward_gain:g}",
    )


def _near_l_max(steps: Sequence[StepTally], rules: Rules) -> Decision:
    return _share_above(
        Rule.NEAR_L_MAX,
        steps,
        rules.window,
        rules.max_near_l_max,
        [(s.num_near_l_max, s.num_completions) for s in steps],
        "completions had more than l_max - l_cache tokens",
    )


def _dropped_groups(steps: Sequence[StepTally], rules: Rules) -> Decision:
    return _share_above(
        Rule.DROPPED_GROUPS,
        steps,
        rules.window,
        rules.max_dropped_groups,
        [(s.num_dropped, s.num_groups) for s in steps],
        "groups were dropped because their rewards were all equal",
    )


def _share_above(
    rule: Rule,
    steps: Sequence[StepTally],
    window: int,
    bound: float | None,
    counts: Sequence[tuple[int, int]],
    what: str,
) -> Decision:
    """`counts` are (those, of so many) for each step."""
    if bound is None or len(steps) < window:
        return STAY
    part = sum(some for some, _ in counts[-window:])
    whole = sum(total for _, total in counts[-window:])
    if part <= bound * whole:
        return STAY
    return Decision(
        rule,
        f"{part} of {whole} {what} in {_span(steps[-window:])}: {part / whole:.4f}, more than "
        f"{bound:g}",
    )


def _step(steps: Sequence[StepTally], rules: Rules) -> Decision:
    if rules.max_steps is None or len(steps) < rules.max_steps:
        return STAY
    return Decision(Rule.STEP, f"the stage has lasted {len(steps)} steps of {rules.max_steps}")


def _mean_reward(steps: Sequence[StepTally]) -> float | None:
    """None where nothing was graded."""
    count = sum(step.num_completions for step in steps)
    return sum(step.reward_sum for step in steps) / count if count else None


def _span(steps: Sequence[StepTally]) -> str:
    first, last = steps[0].step, steps[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"
