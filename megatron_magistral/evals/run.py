"""Samples and grades held-out problems on the engines of a run, all with one policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_magistral.evals.report import EvalReport, summarise
from megatron_magistral.rollout.pipeline import Grader, Sampler
from megatron_magistral.types import Graded, Problem

GROUP = "evaluation"


async def evaluate(
    problems: Sequence[Problem],
    sample: Sampler,
    grade: Grader,
    *,
    num_samples: int,
    concurrency: int,
    protocol: dict[str, float],
) -> EvalReport:
    """`num_samples` graded completions of every problem, at most `concurrency` at once."""
    limit = asyncio.Semaphore(concurrency)

    async def one(problem: Problem) -> Graded:
        async with limit:
            completion = await sample(problem)
        return Graded(completion, await grade(problem, completion, group=GROUP))

    async with asyncio.TaskGroup() as tasks:
        rows = [
            [tasks.create_task(one(problem)) for _ in range(num_samples)] for problem in problems
        ]
    samples = [
        (problem, [task.result() for task in row])
        for problem, row in zip(problems, rows, strict=True)
    ]
    return summarise(samples, {"num_samples": num_samples, **protocol})
