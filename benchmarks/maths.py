"""`magistral bench maths`: accuracy and speed of the maths check, next to math-verify's.

Every number comes from one run: the pairs of the test data are judged in a warm worker, one at a
time, by the CPU time of the worker; math-verify judges the same pairs in its own process.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from verifier_sandbox.mathcheck import MathResult, MathVerdict
from verifier_sandbox.mathcheck.pool import MathPool
from verifier_sandbox.mathcheck.rows import BadRow, category_of, label_of, read_rows, text_of
from verifier_sandbox.mathcheck.second_grader import GraderMissing, Opinion, second_opinions

PAIRS = Path(__file__).parents[1] / "tests" / "data" / "math_pairs.jsonl"
HOSTILE = frozenset(("dos", "injection"))
NO_FALSE_POSITIVES = frozenset(("hedge_hack", "injection", "dos", "garbage", "big_small_exact"))
MIN_ACCURACY = 0.985
MAX_ORDINARY_MEAN_MS = 1.0
MAX_HOSTILE_MS = 50.0
MAX_RSS_MIB = 300.0
MIN_SPEEDUP = 10.0


@dataclass(frozen=True)
class Pair:
    """One labelled pair."""

    gold: str
    pred: str
    is_match: bool
    category: str


@dataclass(frozen=True)
class Measured:
    """What one grader said about one pair, and the CPU time it took."""

    pair: Pair
    is_match: bool
    cpu_ms: float

    @property
    def is_false_positive(self) -> bool:
        return self.is_match and not self.pair.is_match


def read_pairs(path: Path) -> list[Pair]:
    """The labelled pairs of a JSON-lines file. Raises BadRow."""
    pairs = []
    for number, row in enumerate(read_rows(path), start=1):
        label = label_of(row, number)
        if label is None:
            raise BadRow(f"row {number}: 'match' is missing; true or false is needed")
        gold, pred = text_of(row, number, "gold"), text_of(row, number, "pred")
        pairs.append(Pair(gold, pred, label, category_of(row, number)))
    return pairs


async def measure_ours(pairs: list[Pair]) -> tuple[list[Measured], float, float]:
    """Judge the pairs in one warm worker: results, checks per second by the wall, peak RSS."""
    async with MathPool(num_workers=1) as pool:
        for pair in pairs[:20]:
            await pool.check(pair.gold, pair.pred)
        measured = []
        begin = time.perf_counter()
        for pair in pairs:
            before_s = pool.cpu_used_s()
            result: MathResult = await pool.check(pair.gold, pair.pred)
            cpu_ms = (pool.cpu_used_s() - before_s) * 1e3
            measured.append(Measured(pair, result.verdict is MathVerdict.CORRECT, cpu_ms))
        per_s = len(pairs) / (time.perf_counter() - begin)
        return measured, per_s, pool.peak_rss_mib()


def measure_math_verify(pairs: list[Pair], python: str) -> list[Measured]:
    """math-verify on the same pairs, in its own process. Raises GraderMissing."""
    opinions: list[Opinion] = second_opinions([(pair.gold, pair.pred) for pair in pairs], python)
    return [
        Measured(pair, bool(opinion.is_match), opinion.cpu_s * 1e3)
        for pair, opinion in zip(pairs, opinions, strict=True)
    ]


def summarize(measured: list[Measured]) -> dict[str, float]:
    """Accuracy, errors and times of one grader."""
    ordinary_ms = [m.cpu_ms for m in measured if m.pair.category not in HOSTILE]
    hostile_ms = [m.cpu_ms for m in measured if m.pair.category in HOSTILE]
    wrong = Counter(
        "positive" if m.is_false_positive else "negative"
        for m in measured
        if m.is_match is not m.pair.is_match
    )
    return {
        "accuracy": 1 - sum(wrong.values()) / len(measured),
        "false negatives": wrong["negative"],
        "false positives": wrong["positive"],
        "false positives in the five strict categories": sum(
            m.is_false_positive for m in measured if m.pair.category in NO_FALSE_POSITIVES
        ),
        "ordinary pair, mean ms": statistics.mean(ordinary_ms or [0.0]),
        "ordinary pair, median ms": statistics.median(ordinary_ms or [0.0]),
        "hostile pair, max ms": max(hostile_ms, default=0.0),
        "total CPU s": sum(m.cpu_ms for m in measured) / 1e3,
    }


def main(
    pairs_file: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="Labelled pairs.")
    ] = PAIRS,
    math_verify_python: Annotated[
        str | None, typer.Option(help="An interpreter that has math-verify, to compare with.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    """Measure the maths check; exit with 1 if a target is missed."""
    console = Console()
    try:
        pairs = read_pairs(pairs_file)
    except BadRow as error:
        raise typer.BadParameter(str(error)) from None
    if math_verify_python is not None and shutil.which(math_verify_python) is None:
        raise typer.BadParameter(f"--math-verify-python: {math_verify_python} is no program")
    if out is not None and not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"--out: the folder of {out} does not exist")
    measured, per_s, rss_mib = asyncio.run(measure_ours(pairs))
    ours = summarize(measured) | {"checks per s, one worker": per_s, "peak RSS MiB": rss_mib}
    theirs: dict[str, float] = {}
    if math_verify_python is not None:
        try:
            theirs = summarize(measure_math_verify(pairs, math_verify_python))
        except GraderMissing as error:
            raise typer.BadParameter(str(error)) from None
    table = Table("", "ours", "math-verify", title=f"maths check, {len(pairs)} pairs")
    for name, value in ours.items():
        other = f"{theirs[name]:.4g}" if name in theirs else "-"
        table.add_row(name, f"{value:.4g}", other)
    console.print(table)
    missed = missed_targets(ours, theirs)
    for name in missed:
        console.print(f"missed: {name}", style="bold red")
    if out is not None:
        numbers = {"ours": ours, "math_verify": theirs, "missed": missed}
        out.write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    if missed:
        raise typer.Exit(1)


def missed_targets(ours: dict[str, float], theirs: dict[str, float]) -> list[str]:
    """The targets that the numbers miss."""
    targets = {
        f"accuracy >= {MIN_ACCURACY}": ours["accuracy"] >= MIN_ACCURACY,
        "no false positive in the five strict categories": (
            ours["false positives in the five strict categories"] == 0
        ),
        f"ordinary pair <= {MAX_ORDINARY_MEAN_MS} ms": (
            ours["ordinary pair, mean ms"] <= MAX_ORDINARY_MEAN_MS
        ),
        f"hostile pair <= {MAX_HOSTILE_MS} ms": ours["hostile pair, max ms"] <= MAX_HOSTILE_MS,
        f"peak RSS <= {MAX_RSS_MIB} MiB": ours["peak RSS MiB"] <= MAX_RSS_MIB,
    }
    if theirs:
        speedup = theirs["total CPU s"] / ours["total CPU s"]
        targets[f"throughput >= {MIN_SPEEDUP} x math-verify's (here {speedup:.1f} x)"] = (
            speedup >= MIN_SPEEDUP
        )
    return [name for name, is_met in targets.items() if not is_met]


if __name__ == "__main__":
    typer.run(main)
