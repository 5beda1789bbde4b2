"""What the service counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from verifier_sandbox.protocol import JudgeRequest, JudgeResult
from verifier_sandbox.service import Service

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class _PoolCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> list[GaugeMetricFamily]:
        pool, judge = self._service.pool, self._service.judge
        values = {
            "verifier_slots": (pool.num_slots, "Programs that may run at once"),
            "verifier_slots_busy": (pool.num_busy, "Slots at work"),
            "verifier_queue_length": (pool.num_waiting, "Submissions that wait for a slot"),
            "verifier_submissions_unfinished": (pool.num_unfinished, "Admitted, not yet answered"),
            "verifier_launcher_restarts": (pool.num_restarts, "Launchers replaced since the start"),
            "verifier_compile_cache_hits": (judge.cache.num_hits, "Compilations saved"),
            "verifier_compile_cache_misses": (judge.cache.num_misses, "Compilations done"),
            "verifier_checker_program_failures": (
                judge.num_helper_failures,
                "Tests on which a sound checker program or interactor crashed or hit a limit",
            ),
            "verifier_internal_errors": (
                judge.num_internal_errors,
                "Submissions on which the judge itself failed",
            ),
        }
        return [GaugeMetricFamily(name, text, value) for name, (value, text) in values.items()]


class Metrics:
    """Counters of one service, in a registry of their own."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_PoolCollector(service))
        self._verdicts = Counter(
            "verifier_submissions",
            "Judged submissions",
            ["language", "verdict"],
            registry=self._registry,
        )
        self._tests = Counter(
            "verifier_tests", "Tests run", ["language", "verdict"], registry=self._registry
        )
        self._maths = Counter(
            "verifier_maths_checks", "Maths checks", ["verdict"], registry=self._registry
        )
        self._rejected = Counter(
            "verifier_rejected", "Requests turned away by a full queue", registry=self._registry
        )
        self._reruns = Counter("verifier_reruns", "Tests run again alone", registry=self._registry)
        self._retries = Counter(
            "verifier_retries", "Attempts lost to faults of the machine", registry=self._registry
        )
        self._latency = Histogram(
            "verifier_judge_seconds",
            "Wall time of a submission, queue included",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._cpu = Histogram(
            "verifier_test_cpu_seconds",
            "CPU time of a test",
            ["language"],
            buckets=_SECONDS,
            registry=self._registry,
        )

    def judged(self, request: JudgeRequest, result: JudgeResult, wall_s: float) -> None:
        language = request.language.value
        self._verdicts.labels(language, result.verdict.value).inc()
        self._latency.observe(wall_s)
        self._reruns.inc(result.num_reruns)
        self._retries.inc(result.num_retries)
        for test in result.per_test:
            self._tests.labels(language, test.verdict.value).inc()
            self._cpu.labels(language).observe(test.cpu_ms / 1e3)

    def checked_maths(self, verdict: str) -> None:
        self._maths.labels(verdict).inc()

    def rejected(self) -> None:
        self._rejected.inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
