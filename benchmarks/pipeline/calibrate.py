"""How fast an engine is at each concurrency, and what a new prompt costs it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_magistral.analysis.speeds import SpeedCurve
from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.generator import Generator, SamplingSettings
from megatron_magistral.rollout.sglang_server import ModelLimits

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_TOKENS = 40
NUM_STARTS = 16
READY_S = 300.0


@dataclass(frozen=True)
class Calibration:
    """`points` are (concurrency, tokens/s of all together), prompts not counted; `start_s` is what
    one more prompt costs where several are sent at once."""

    points: tuple[tuple[float, float], ...]
    start_s: float


def calibrate(
    url: str, limits: ModelLimits, prompt_tokens: float, sampled_tokens: float
) -> Calibration:
    """Of an engine with nothing else to do. Prompts have `prompt_tokens`, and completions that run
    have on average sampled `sampled_tokens`."""
    prompt, context = round(prompt_tokens), round(prompt_tokens + sampled_tokens)
    return asyncio.run(_calibrate(url, limits, prompt, context))


async def _calibrate(
    url: str, limits: ModelLimits, prompt_tokens: int, context_tokens: int
) -> Calibration:
    async with Generator(url, limits) as engine:
        await engine.wait_ready(READY_S)
        await _tokens_per_s(engine, 4, context_tokens)  # what the first requests alone pay for
        points = [(c, await _tokens_per_s(engine, c, context_tokens)) for c in CONCURRENCIES]
        return Calibration(tuple(points), await _start_s(engine, prompt_tokens))


async def _tokens_per_s(engine: Generator, concurrency: int, context_tokens: int) -> float:
    """From when the last has brought its first tokens until all have ended."""
    sampling = SamplingSettings(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    begun: dict[int, float] = {}
    arrived: list[tuple[float, int]] = []

    async def one(number: int) -> None:
        def note(tokens: NewTokens) -> None:
            now = time.perf_counter()
            begun.setdefault(number, now)
            arrived.append((now, len(tokens.ids)))

        prompt = _prompt(number, context_tokens - NUM_TOKENS // 2)
        await engine.generate(prompt, sampling, cache_salt="calibration", on_tokens=note)

    await asyncio.gather(*(one(number) for number in range(concurrency)))
    begin, end = max(begun.values()), max(at for at, _ in arrived)
    return sum(count for at, count in arrived if at > begin) / (end - begin)


async def _start_s(engine: Generator, prompt_tokens: int) -> float:
    sampling = SamplingSettings(max_new_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    requests = (
        engine.generate(_prompt(1000 + i, prompt_tokens), sampling, cache_salt="calibration")
        for i in range(NUM_STARTS)
    )
    await asyncio.gather(*requests)
    return (time.perf_counter() - begin) / NUM_STARTS


def _prompt(number: int, num_tokens: int) -> list[int]:
    """No two share a prefix."""
    return [5 + number % 200, 5 + number // 200, *[7] * max(1, num_tokens - 2)]


def mean_of(calibrations: Sequence[Calibration]) -> tuple[SpeedCurve, float]:
    """The mean at each concurrency, and of the starts."""
    columns = zip(*(calibration.points for calibration in calibrations), strict=True)
    points = tuple(
        (column[0][0], statistics.fmean(speed for _, speed in column)) for column in columns
    )
    return SpeedCurve(points), statistics.fmean(c.start_s for c in calibrations)
