"""Role `selection`: which weights of the SFT stage solve most held-out problems (section 5.3).

SFT has left a model directory every `sft.candidate_every_steps` steps. The trainers have ended; the
servers that RL would generate with load one candidate after the other, and pass@1 is measured as
before and after RL. The best becomes <run>/models/sft. What was measured stays on the disk, so that
a stage that is interrupted goes on with the next candidate.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoTokenizer

from megatron_magistral.config import Config
from megatron_magistral.config_file import load
from megatron_magistral.data.datasets import Datasets, dataset_paths
from megatron_magistral.evals.report import EvalReport
from megatron_magistral.evals.run import evaluate
from megatron_magistral.prompts import load_template, render_prompt
from megatron_magistral.rewards.language import fasttext_identifier
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.generator import Generator, SamplingSettings
from megatron_magistral.rollout.grader import RewardGrader
from megatron_magistral.rollout.role import (
    fitting,
    make_grader,
    pool_settings,
    ready_engines,
    verifier_client,
)
from megatron_magistral.rollout.sglang_server import ModelLimits
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.types import Completion, Problem
from megatron_magistral.weights.architecture import read_architecture
from megatron_magistral.weights.hf_dir import link_hf_dir

log = logging.getLogger(__name__)

REQUESTS_PER_ENGINE = 256


class NoCandidate(RuntimeError):
    """There is nothing to choose from."""


async def select(
    run: RunFolder, measure: Callable[[int, Path], Awaitable[EvalReport]]
) -> tuple[int, EvalReport]:
    """Measures every candidate that has no report yet; makes the best one <run>/models/sft.

    Returns its number of steps, and its report. Raises NoCandidate.
    """
    reports: dict[int, EvalReport] = {}
    for step, model in run.sft_candidates().items():
        path = run.eval_candidate(step)
        if not path.exists():
            _save(await measure(step, model), path)
        reports[step] = EvalReport.load(path)
        log.info("after %d steps of SFT: pass@1 %s", step, reports[step].overall.pass_at_1)
    best = best_step(reports)
    link_hf_dir(run.sft_candidates()[best], run.sft_model)
    record = {"step": best, "pass_at_1": reports[best].overall.pass_at_1}
    run.sft_selected.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return best, reports[best]


def best_step(reports: Mapping[int, EvalReport]) -> int:
    """The highest pass@1; of equals the one with fewer steps. Raises NoCandidate."""
    rates = {step: report.overall.pass_at_1 for step, report in reports.items()}
    measured = {step: rate for step, rate in rates.items() if rate is not None}
    if not measured:
        raise NoCandidate(
            f"of {len(reports)} candidates none has a pass@1: SFT has left none, or no completion "
            "could be graded"
        )
    return min(measured, key=lambda step: (-measured[step], step))


def _save(report: EvalReport, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    report.save(partial)
    partial.replace(path)


class Measurement:
    """Loads a candidate into every engine and measures its pass@1 on the held-out problems."""

    def __init__(
        self,
        config: Config,
        engines: Sequence[Generator],
        grade: RewardGrader,
        encode: Callable[[Problem], list[int]],
        stop_token_id: int,
        problems: Sequence[Problem],
    ) -> None:
        self._config = config
        self._engines = engines
        self._pool = EnginePool(engines, pool_settings(config))
        self._grade = grade
        self._encode = encode
        settings = config.evaluation
        self._problems = problems[: settings.num_problems]
        self._sampling = SamplingSettings(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_new_tokens=config.reward.l_max,
            stop_token_ids=(stop_token_id,),
        )

    async def __call__(self, step: int, model: Path) -> EvalReport:
        timeout_s = self._config.generator.start_timeout_s
        self._pool.close_gate(step)
        loads = (engine.load_model(model, step, timeout_s) for engine in self._engines)
        await asyncio.gather(*loads)
        self._pool.open_gate(step)
        return await evaluate(
            self._problems,
            self._sample,
            self._grade,
            num_samples=self._config.evaluation.num_samples,
            concurrency=REQUESTS_PER_ENGINE * len(self._engines),
            protocol={
                "temperature": self._sampling.temperature,
                "top_p": self._sampling.top_p,
                "max_new_tokens": self._sampling.max_new_tokens,
                "version": step,
            },
        )

    async def close(self) -> None:
        await self._pool.close()

    async def _sample(self, problem: Problem) -> Completion:
        return await self._pool.generate(self._encode(problem), self._sampling)


async def run_selection(
    config: Config, run: RunFolder, urls: Sequence[str], verifier_addresses: Sequence[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run.sft_model)
    arch = read_architecture(run.sft_model)
    limits = ModelLimits(arch.vocab_size, arch.max_position_embeddings)
    template = load_template(config.data.prompt_file)
    room = limits.context_length - config.reward.l_max
    held_out = Datasets.read(dataset_paths(config, run)).held_out

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode(problem: Problem) -> list[int]:
        return tokenizer.encode(render_prompt(problem.statement, template))

    async with AsyncExitStack() as stack:
        engines = await ready_engines(stack, config, limits, urls, decode)
        verifiers = verifier_client(config, verifier_addresses)
        stack.push_async_callback(verifiers.close)
        grade = make_grader(config, verifiers, fasttext_identifier())
        problems = fitting(held_out, tokenizer, template, room)
        measure = Measurement(config, engines, grade, encode, tokenizer.eos_token_id, problems)
        stack.push_async_callback(measure.close)
        step, report = await select(run, measure)
    if config.rl is None:
        link_hf_dir(run.sft_model, run.model)
    log.info("chosen: %d steps of SFT, pass@1 %s", step, report.overall.pass_at_1)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path, typer.Option()],
    generators: Annotated[str, typer.Option(help="URLs, separated by commas")],
    verifiers: Annotated[str, typer.Option(help="URLs; else the run folder's socket")] = "",
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request
    folder = RunFolder(run)
    with folder.lock("selection"):
        addresses = verifiers.split(",") if verifiers else [f"unix:{folder.verifier_socket}"]
        asyncio.run(run_selection(load(folder.config), folder, generators.split(","), addresses))


if __name__ == "__main__":
    app()
