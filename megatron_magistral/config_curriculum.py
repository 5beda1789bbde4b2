"""The later stages of an RL run, `rl.stages` (section 5.2 of the paper).

The sections `rl`, `reward` and `data` describe the first stage. Each item of `rl.stages` describes
one that follows: when it begins, and what is different from then on. Keys that it leaves out stay
as they were in the stage before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from megatron_magistral.algorithm.curriculum import Rules
from megatron_magistral.config_section import Fraction, Positive, PositiveFloat, Section


class BeginConfig(Section):
    """When a stage begins: by the first rule that holds. Rules see the steps of the stage before
    it alone. See `algorithm/curriculum.py`."""

    min_steps: Positive = 1
    """Steps of the stage before it, at the least, whatever the rules say."""
    window: Positive = 20
    """Steps over which a mean or a share is taken."""
    max_steps: Positive | None = None
    """Steps of the stage before it, at the most."""
    min_reward_gain: PositiveFloat | None = None
    """The mean reward grew by less than this from one window to the next."""
    max_near_l_max: Fraction | None = None
    """A larger share of completions than this had more than l_max - l_cache tokens."""
    max_dropped_groups: Fraction | None = None
    """A larger share of groups than this was dropped, all of its rewards being equal."""

    @model_validator(mode="after")
    def _some_rule(self) -> Self:
        rules = ("max_steps", "min_reward_gain", "max_near_l_max", "max_dropped_groups")
        if all(getattr(self, name) is None for name in rules):
            raise ValueError(f"give at least one of {', '.join(rules)}: else it never begins")
        if self.max_steps is not None and self.max_steps < self.min_steps:
            raise ValueError(
                f"max_steps = {self.max_steps} must be at least min_steps = {self.min_steps}"
            )
        return self

    def rules(self) -> Rules:
        return Rules(**self.model_dump())


class RlStageConfig(Section):
    begin: BeginConfig
    l_max: Positive | None = None
    """These replace the values of the same name in `reward` and `rl`."""
    l_cache: Positive | None = None
    n_async: Positive | None = None
    n_batch: Positive | None = None
    n_minibatch: Positive | None = None
    queue_size: Positive | None = None
    kv_budget_tokens: Positive | None = None
    kv_reserve: Annotated[float, Field(gt=0, le=1)] | None = None
    add_problems: Path | None = None
    """JSONL of harder problems that come in (see data/schema.py)."""
    drop_solved_above: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Problems go out of which more than this share of the latest completions was solved."""

    def overlay(self) -> dict[str, dict[str, Any]]:
        """What replaces values of the sections `rl` and `reward`."""
        given = self.model_dump(exclude_none=True)
        sections = {
            "reward": ("l_max", "l_cache"),
            "rl": (
                *("n_async", "n_batch", "n_minibatch", "queue_size"),
                *("kv_budget_tokens", "kv_reserve"),
            ),
        }
        return {
            section: {key: given[key] for key in keys if key in given}
            for section, keys in sections.items()
        }
