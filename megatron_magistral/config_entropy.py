"""`rl.algorithm.entropy`: whether and how the upper clipping bound follows the policy's entropy."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from megatron_magistral.algorithm.entropy import EntropyControl, EntropySettings
from megatron_magistral.config_section import Count, PositiveFloat, Section


class EntropyConfig(Section):
    """Section 2.1 of the paper: eps_high was moved between 0.26 and 0.28 by hand."""

    control: EntropyControl = EntropyControl.OFF
    """off; suggest: metrics say what eps_high should be; act: steps are trained with that."""
    eps_high_min: PositiveFloat = 0.26
    eps_high_max: PositiveFloat = 0.28
    target: PositiveFloat | None = None
    """Entropy to keep, nats a token; null: the mean of the first `warmup_steps` steps."""
    tolerance: PositiveFloat = 0.1
    """Relative distance from the target within which eps_high stays."""
    step: PositiveFloat = 0.002
    """By how much eps_high moves after a step whose smoothed entropy is outside of that."""
    warmup_steps: Count = 5
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.8
    """Weight of the past in the average of the entropy that is compared with the target."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.eps_high_min > self.eps_high_max:
            raise ValueError(
                f"eps_high_min = {self.eps_high_min} must not exceed "
                f"eps_high_max = {self.eps_high_max}"
            )
        if self.target is None and self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} must be at least 1 where target = null: "
                "the target is the mean entropy of these steps"
            )
        return self

    def settings(self) -> EntropySettings:
        return EntropySettings(**self.model_dump())
