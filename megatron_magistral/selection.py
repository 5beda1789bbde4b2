"""Role `selection`: which weights of the SFT stage solve most held-out problems (section 5.3).

SFT has left a model directory every `sft.candidate_every_steps` steps. The trainers have ended; the
servers that RL would generate with load one candidate after the other, and pass@1 is measured as
before and after RL. The best becomes <run>/models/sft. What was measured stays on the disk, so that
a stage that is interrupted, or asked to stop, goes on with the candidate that it was at.

A server that ends is restarted by whoever started it, and loads the candidate once it answers.
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
from megatron_magistral.rollout.controller import first_to_end
from megatron_magistral.rollout.engine import EngineError
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.engine_state import EngineState
from megatron_magistral.rollout.generator import Generator, SamplingSettings
from megatron_magistral.rollout.grader import RewardGrader
from megatron_magistral.rollout.pool_parts import NoEngineLeft, restarted_elsewhere
from megatron_magistral.rollout.role import (
    ask_for_restart,
    fitting,
    make_grader,
    pool_settings,
    ready_engines,
    told_in_a_line,
    verifier_client,
)
from megatron_magistral.rollout.sglang_server import ModelLimits
from megatron_magistral.run_folder import RunBusy, RunFolder
from megatron_magistral.signals import STOPPED
from megatron_magistral.types import Completion, Problem
from megatron_magistral.weights.architecture import read_architecture
from megatron_magistral.weights.hf_dir import link_hf_dir
from verifier_sandbox.client import VerifiersDown

log = logging.getLogger(__name__)

REQUESTS_PER_ENGINE = 256
LOOK_S = 1.0  # between two looks at what no event tells of


class NoCandidate(RuntimeError):
    """There is nothing to choose from."""


EXPECTED = (EngineError, NoCandidate, NoEngineLeft, RunBusy, VerifiersDown)


class StopRequested(Exception):
    """The run is asked to stop: what is measured is kept."""


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
        restart: Callable[[str], Awaitable[None]] = restarted_elsewhere,
    ) -> None:
        self._config = config
        self._engines = engines
        self._pool = EnginePool(engines, pool_settings(config), restart)
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
        await self._load(self._engines, step, model)
        reports: list[EvalReport] = []

        async def measure() -> None:
            reports.append(await self._evaluate(step))

        await first_to_end(measure(), self._load_late(step, model))
        return reports[0]

    async def _load(self, engines: Sequence[Generator], step: int, model: Path) -> None:
        """Give `engines` the weights; one that fails is left out until it answers again.

        Raises EngineError if none has them.
        """
        timeout_s = self._config.generator.start_timeout_s
        names = {engine.name for engine in engines}
        kept = [name for name in self._in_state(EngineState.HEALTHY) if name not in names]
        self._pool.close_gate(step)
        outcomes = await asyncio.gather(
            *(engine.load_model(model, step, timeout_s) for engine in engines),
            return_exceptions=True,
        )
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            if not isinstance(failure, EngineError):
                raise failure
            log.warning("%s", failure)
        loaded = [e.name for e, outcome in zip(engines, outcomes, strict=True) if outcome is None]
        if not loaded and not kept:
            raise failures[0]
        self._pool.open_gate(step, [*kept, *loaded])

    async def _load_late(self, step: int, model: Path) -> None:
        """Give the weights to engines that come back while others are asked, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            stale = self._in_state(EngineState.STALE)
            if self._pool.wants_update and stale:
                await self._load([e for e in self._engines if e.name in stale], step, model)

    def _in_state(self, state: EngineState) -> list[str]:
        return [name for name, status in self._pool.statuses.items() if status.state is state]

    async def _evaluate(self, step: int) -> EvalReport:
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
    cache_tokens = config.generator.max_total_tokens or limits.context_length
    room = min(limits.context_length, cache_tokens) - config.reward.l_max
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
        restart = ask_for_restart(config, run)
        measure = Measurement(
            config, engines, grade, encode, tokenizer.eos_token_id, problems, restart
        )
        stack.push_async_callback(measure.close)

        async def choose() -> None:
            step, report = await select(run, measure)
            log.info("chosen: %d steps of SFT, pass@1 %s", step, report.overall.pass_at_1)

        await first_to_end(choose(), until_stop_requested(run))
    if config.rl is None:
        link_hf_dir(run.sft_model, run.model)


async def until_stop_requested(run: RunFolder) -> None:
    """Raises StopRequested."""
    while not run.stop_requested.exists():
        await asyncio.sleep(LOOK_S)
    raise StopRequested("asked to stop: the candidates that are measured are kept")


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
    addresses = verifiers.split(",") if verifiers else [f"unix:{folder.verifier_socket}"]
    try:
        with told_in_a_line(EXPECTED, log), folder.lock("selection"):
            config = load(folder.config)
            asyncio.run(run_selection(config, folder, generators.split(","), addresses))
    except StopRequested as error:
        log.info("%s", error)
        raise typer.Exit(STOPPED) from error


if __name__ == "__main__":
    app()
