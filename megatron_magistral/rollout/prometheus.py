"""A run's numbers for Prometheus: the last trained step's, and what is true when it asks.

The step's numbers are those of metrics.jsonl under `magistral_<name>`; the live ones are asked of
their owners at each scrape, so that nothing is kept twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_magistral.rollout.engine_state import EngineState, EngineStatus

__all__ = ["CONTENT_TYPE_LATEST", "RunExposition"]

PREFIX = "magistral"


class RunExposition(Collector):
    """`live` gives numbers by name, `engines` their statuses. `render` is what a scrape gets."""

    def __init__(
        self,
        live: Callable[[], Mapping[str, float]],
        engines: Callable[[], Mapping[str, EngineStatus]],
    ) -> None:
        self._live, self._engines = live, engines
        self._step = -1
        self._values: Mapping[str, float] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def trained(self, step: int, values: Mapping[str, float]) -> None:
        """`step` is trained; `values` are its row of metrics."""
        self._step, self._values = step, values

    def render(self) -> bytes:
        """The text format, with content type CONTENT_TYPE_LATEST."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        yield _metric("step", "Last trained step; -1 before the first", self._step)
        live = self._live()
        for name, value in sorted(live.items()):
            yield _metric(name, "At the moment of the scrape", value)
        for name, value in sorted(self._values.items()):
            if name not in live:
                yield _metric(name, "Of the last trained step", value)
        yield self._engine_states()

    def describe(self) -> list[Metric]:
        """Nothing beforehand: which metrics there are is known once a step is trained."""
        return []

    def _engine_states(self) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}_engine_state",
            "1 for the state that an engine is in, 0 for the others",
            labels=("engine", "state"),
        )
        for name, status in self._engines().items():
            for state in EngineState:
                family.add_metric((name, str(state)), float(status.state is state))
        return family


def _metric(name: str, text: str, value: float) -> Metric:
    """Numbers that only grow are named `..._total`, here as there."""
    if name.endswith("_total"):
        return CounterMetricFamily(f"{PREFIX}_{name.removesuffix('_total')}", text, value=value)
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
