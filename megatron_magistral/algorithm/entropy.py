"""Keeping the policy's entropy stable by the upper clipping bound (arXiv 2506.10910, section 2.1).

A wider upper bound lets unlikely tokens gain probability, which raises entropy; a narrower one lets
it fall. The paper moves eps_high between 0.26 and 0.28 during its Medium run. Here a step is taken
each time the smoothed entropy leaves a band around its target; inside the band nothing is changed,
so that noise does not wander into the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum


class EntropyControl(StrEnum):
    """OFF: eps_high stays. SUGGEST: what would be done is a metric. ACT: it is done."""

    OFF = "off"
    SUGGEST = "suggest"
    ACT = "act"


@dataclass(frozen=True)
class EntropySettings:
    """Entropy in nats a token.

    `eps_high_min` and `eps_high_max` bound what may be chosen. `target` is the entropy to keep; if
    None, the mean of the first `warmup_steps` steps. Within `tolerance` x target of it nothing
    changes; outside, eps_high moves by `step`. `smoothing` is the weight of the past in the moving
    average that is compared.
    """

    control: EntropyControl = EntropyControl.OFF
    eps_high_min: float = 0.26
    eps_high_max: float = 0.28
    target: float | None = None
    tolerance: float = 0.1
    step: float = 0.002
    warmup_steps: int = 5
    smoothing: float = 0.8


@dataclass(frozen=True)
class EntropyController:
    """A value: `observe` gives the next one. A run that goes on replays the recorded entropies."""

    settings: EntropySettings
    eps_high: float
    """The configured bound at first, the controlled one from then on."""
    entropy: float | None = None
    """Smoothed; None before the first step."""
    target: float | None = None
    num_observed: int = 0

    @classmethod
    def start(cls, settings: EntropySettings, eps_high: float) -> EntropyController:
        return cls(settings, eps_high, target=settings.target)

    def observe(self, entropy: float) -> EntropyController:
        """What follows from one step's mean entropy; nothing from one that is not a number, as a
        step that was skipped may have: it would stay in the average for ever."""
        if not math.isfinite(entropy):
            return self
        num_observed = self.num_observed + 1
        if self.settings.target is None and num_observed <= self.settings.warmup_steps:
            before = self.target or 0.0
            target = before + (entropy - before) / num_observed
            return replace(self, entropy=target, target=target, num_observed=num_observed)
        smoothing = self.settings.smoothing if self.entropy is not None else 0.0
        smoothed = smoothing * (self.entropy or 0.0) + (1 - smoothing) * entropy
        seen = replace(self, entropy=smoothed, num_observed=num_observed)
        return replace(seen, eps_high=seen._next_eps_high())

    def used(self, configured: float) -> float:
        """The bound that the next step trains with."""
        return self.eps_high if self.settings.control is EntropyControl.ACT else configured

    def metrics(self, configured: float) -> dict[str, float]:
        """What a step shows of it; nothing where it is off."""
        if self.settings.control is EntropyControl.OFF:
            return {}
        shown = {"eps_high": self.used(configured), "eps_high_suggested": self.eps_high}
        return shown if self.target is None else shown | {"entropy_target": self.target}

    def _next_eps_high(self) -> float:
        assert self.entropy is not None and self.target is not None
        settings = self.settings
        slack = settings.tolerance * self.target
        if self.entropy < self.target - slack:
            moved = self.eps_high + settings.step
        elif self.entropy > self.target + slack:
            moved = self.eps_high - settings.step
        else:
            return self.eps_high
        return min(max(moved, settings.eps_high_min), settings.eps_high_max)
