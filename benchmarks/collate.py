"""Padding of greedy collation against named baselines (arXiv 2506.10910, section 3).

    python -m benchmarks.collate [--num-sequences 512] [--num-seeds 20]

Lengths are drawn anew for every seed and cut at l_max, as a run cuts completions. The budget of a
microbatch is l_max, the smallest that holds every sequence, or a multiple of it. The "19 %" of the
paper names neither its baseline nor its lengths: here both are in the table.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron_magistral.algorithm.collate import CollationReport, collation_report

L_MAX = 32_768
DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "lognormal, median 6k, sigma 0.8": lambda rng: 6_000 * rng.lognormvariate(0, 0.8),
    "lognormal, median 9k, sigma 0.6": lambda rng: 9_000 * rng.lognormvariate(0, 0.6),
    "Pareto, minimum 2k, alpha 1.2": lambda rng: 2_000 * rng.paretovariate(1.2),
    "exponential, mean 8k": lambda rng: rng.expovariate(1 / 8_000),
    "uniform up to l_max": lambda rng: rng.uniform(1, L_MAX),
}


@dataclass(frozen=True)
class Row:
    """Medians over seeds; the ratio to the lower bound also at its worst."""

    distribution: str
    budget: int
    padding: float
    sequential_padding: float
    first_fit_padding: float
    saved_points: float
    ratio: float
    worst_ratio: float
    collate_ms: float


def measure(distribution: str, budget: int, num_sequences: int, num_seeds: int) -> Row:
    reports = []
    seconds = []
    for seed in range(num_seeds):
        lengths = draw_lengths(distribution, num_sequences, seed)
        start = time.perf_counter()
        reports.append(collation_report(lengths, budget))
        seconds.append(time.perf_counter() - start)

    def median(value: Callable[[CollationReport], float]) -> float:
        return statistics.median(map(value, reports))

    return Row(
        distribution=distribution,
        budget=budget,
        padding=median(lambda r: r.padding_fraction),
        sequential_padding=median(lambda r: r.padding_fraction + r.saved_fraction),
        first_fit_padding=median(lambda r: 1 - r.num_tokens / (r.unsorted_first_fit * budget)),
        saved_points=100 * median(lambda r: r.saved_fraction),
        ratio=median(lambda r: r.greedy / r.lower_bound),
        worst_ratio=max(r.greedy / r.lower_bound for r in reports),
        collate_ms=1000 * statistics.median(seconds),
    )


def draw_lengths(distribution: str, num_sequences: int, seed: int) -> list[int]:
    rng = random.Random(f"{distribution}/{seed}")
    draw = DISTRIBUTIONS[distribution]
    return [min(max(math.ceil(draw(rng)), 1), L_MAX) for _ in range(num_sequences)]


def show(rows: Sequence[Row], num_sequences: int, num_seeds: int) -> None:
    title = f"{num_sequences} sequences per rank, l_max {L_MAX}, medians of {num_seeds} seeds"
    table = Table(title=title)
    for name in ("lengths", "budget"):
        table.add_column(name)
    for name in (
        "greedy",
        "sequential fill",
        "unsorted first fit",
        "points saved",
        "greedy / bound",
        "worst",
        "all methods, ms",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.distribution,
            f"{row.budget // L_MAX} l_max",
            f"{row.padding:.1%}",
            f"{row.sequential_padding:.1%}",
            f"{row.first_fit_padding:.1%}",
            f"{row.saved_points:.1f}",
            f"{row.ratio:.4f}",
            f"{row.worst_ratio:.4f}",
            f"{row.collate_ms:.1f}",
        )
    Console(width=150).print(table)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-sequences", type=int, default=512, help="sequences per rank")
    parser.add_argument("--num-seeds", type=int, default=20, help="independent draws")
    arguments = parser.parse_args(argv)
    rows = [
        measure(distribution, budget, arguments.num_sequences, arguments.num_seeds)
        for distribution in DISTRIBUTIONS
        for budget in (L_MAX, 2 * L_MAX)
    ]
    show(rows, arguments.num_sequences, arguments.num_seeds)
    return rows


if __name__ == "__main__":
    main()
