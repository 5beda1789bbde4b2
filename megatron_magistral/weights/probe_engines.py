"""The probe on every engine at once, beside the trainer's own scoring, and its history."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from megatron_magistral.rollout.engine import EngineControl, EngineError, Phase
from megatron_magistral.weights.delivery import EngineAddress
from megatron_magistral.weights.engine_set import EngineSet
from megatron_magistral.weights.probe import (
    AlarmSettings,
    ProbeGap,
    is_drifting,
    probe_gap,
    score_on_engine,
)

log = logging.getLogger(__name__)


class PendingProbe:
    """Engines that are scoring the probe by weights of `version`."""

    def __init__(
        self, engines: Sequence[EngineAddress], token_ids: Sequence[int], version: int
    ) -> None:
        self._engines = EngineSet([EngineControl(e.url, name=e.control_name) for e in engines])
        self._scores: dict[str, list[float]] = {}

        async def score(engine: EngineControl) -> None:
            self._scores[engine.name] = await score_on_engine(engine, token_ids, version)

        self._pending = self._engines.start(Phase.PROBE, score)

    def gaps(self, ours: Sequence[float]) -> tuple[dict[str, ProbeGap], list[EngineError]]:
        """Wait for the engines; each one's gap to `ours`, and those that gave no scores."""
        errors = self._pending.wait()
        return {name: probe_gap(ours, scores) for name, scores in self._scores.items()}, errors

    def close(self) -> None:
        """Break off what has not answered."""
        self._engines.close()


class ProbeHistory:
    """Gaps of past updates, by engine; says when one of them drifts."""

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._gaps: dict[str, deque[float]] = {}
        self._num_alarms = 0

    def add(self, gaps: dict[str, ProbeGap]) -> dict[str, float]:
        """Take one update's gaps and return its metrics: those of the worst engine."""
        length = self._settings.window + self._settings.patience
        for name, gap in gaps.items():
            past = self._gaps.setdefault(name, deque(maxlen=length))
            past.append(gap.mean)
            if is_drifting(list(past), self._settings):
                self._num_alarms += 1
                log.error(
                    "engine %s: its log-probabilities of the probe drift away from the trainer's: "
                    "%.3g nats on average, more than %g times the usual for %d updates",
                    name,
                    gap.mean,
                    self._settings.factor,
                    self._settings.patience,
                )
        metrics = {"probe_alarms_total": float(self._num_alarms)}
        if gaps:
            metrics["probe_gap_mean"] = max(gap.mean for gap in gaps.values())
            metrics["probe_gap_max"] = max(gap.max for gap in gaps.values())
        return metrics
