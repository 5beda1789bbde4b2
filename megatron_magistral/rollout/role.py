"""Role `controller`: connects the controller of a run to its engines and verifiers."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_magistral.config import Config
from megatron_magistral.config_file import load
from megatron_magistral.data.datasets import Datasets, dataset_paths, harder_problems
from megatron_magistral.jsonl import DamagedRows
from megatron_magistral.prompt_room import longest_prompt
from megatron_magistral.prompts import load_template, render_prompt
from megatron_magistral.restart_requests import AskForRestart, RestartRequests
from megatron_magistral.rewards.language import LanguageIdentifier, fasttext_identifier
from megatron_magistral.rewards.settings import RewardSettings
from megatron_magistral.rollout.controller import Controller
from megatron_magistral.rollout.engine import EngineError
from megatron_magistral.rollout.engine_pool import EnginePool, NoEngineLeft, PoolSettings
from megatron_magistral.rollout.generator import Generator
from megatron_magistral.rollout.grader import RewardGrader
from megatron_magistral.rollout.journal import JournalError
from megatron_magistral.rollout.kv_budget import CacheTooSmall, check_caches
from megatron_magistral.rollout.ledger import LedgerError
from megatron_magistral.rollout.queue import NothingToLearn
from megatron_magistral.rollout.sglang_server import ModelLimits
from megatron_magistral.rollout.stages import LaterStage, NoProblemsLeft
from megatron_magistral.run_folder import RunBusy, RunFolder
from megatron_magistral.signals import SIGNAL_BASE
from megatron_magistral.trainer.checkpoint_files import CheckpointError
from megatron_magistral.types import Problem
from megatron_magistral.weights.architecture import read_architecture
from verifier_sandbox.client import VerifierClient, VerifiersDown

log = logging.getLogger(__name__)

FAILED = 1
EXPECTED = (
    *(CacheTooSmall, CheckpointError, DamagedRows, EngineError, JournalError, LedgerError),
    *(NoEngineLeft, NoProblemsLeft, NothingToLearn, RunBusy, VerifiersDown),
)


async def control(
    config: Config,
    run: RunFolder,
    host: str,
    port: int,
    urls: Sequence[str],
    verifier_addresses: Sequence[str],
) -> None:
    assert config.rl is not None
    tokenizer = AutoTokenizer.from_pretrained(run.rl_model(config))
    arch = read_architecture(run.rl_model(config))
    limits = ModelLimits(arch.vocab_size, arch.max_position_embeddings)
    template = load_template(config.data.prompt_file)
    datasets = Datasets.read(dataset_paths(config, run))
    room = longest_prompt(config, limits.context_length).num_tokens

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    async with AsyncExitStack() as stack:
        engines = await ready_engines(stack, config, limits, urls, decode)
        if (budget_tokens := largest_kv_budget(config)) is not None:
            await check_caches(engines, budget_tokens)
        verifiers = verifier_client(config, verifier_addresses)
        stack.push_async_callback(verifiers.close)
        identifier = fasttext_identifier()

        def fit(problems: Sequence[Problem]) -> list[Problem]:
            return fitting(problems, tokenizer, template, room)

        controller = Controller(
            config,
            run,
            EnginePool(engines, pool_settings(config), ask_for_restart(config, run)),
            make_grader(config, verifiers, identifier),
            tokenizer,
            template,
            fit(datasets.train),
            fit(datasets.held_out),
            [
                LaterStage(
                    fit(problems) if problems else (),
                    make_grader(config.at_stage(index), verifiers, identifier),
                )
                for index, problems in enumerate(harder_problems(config, datasets.train), start=1)
            ],
            verifier_metrics=verifiers.metrics,
        )
        await controller.run(host, port)


async def ready_engines(
    stack: AsyncExitStack,
    config: Config,
    limits: ModelLimits,
    urls: Sequence[str],
    decode: Callable[[Sequence[int]], str],
) -> list[Generator]:
    """One for each URL, once all of them answer. Raises EngineTimeout."""
    bound_s = config.generator.request_timeout_s
    engines = [
        await stack.enter_async_context(
            Generator(url, limits, decode=decode, stall_timeout_s=bound_s)
        )
        for url in urls
    ]
    await asyncio.gather(*(e.wait_ready(config.generator.start_timeout_s) for e in engines))
    return engines


def largest_kv_budget(config: Config) -> int | None:
    """Of all stages; None where none has one."""
    stages = (config.at_stage(index).rl for index in range(config.num_rl_stages))
    budgets = [rl.kv_budget_tokens for rl in stages if rl is not None]
    return max((budget for budget in budgets if budget is not None), default=None)


def verifier_client(config: Config, addresses: Sequence[str]) -> VerifierClient:
    verifier = config.verifier
    return VerifierClient(addresses, timeout_s=verifier.timeout_s, outage_s=verifier.outage_s)


def make_grader(
    config: Config, verifiers: VerifierClient, identifier: LanguageIdentifier
) -> RewardGrader:
    return RewardGrader(
        verifiers,
        identifier,
        reward_settings(config),
        num_code_tests=config.reward.num_code_tests,
    )


def fitting(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    room: int,
) -> list[Problem]:
    """The problems whose prompt has at most `room` tokens; the log names the others.

    Raises ValueError if there is none.
    """
    kept = []
    for problem in problems:
        length = len(tokenizer.encode(render_prompt(problem.statement, template)))
        if length <= room:
            kept.append(problem)
        else:
            log.warning(
                "set aside %s: its prompt has %d tokens, at most %d leave room for a completion",
                problem.id,
                length,
                room,
            )
    if not kept:
        raise ValueError(
            f"none of {len(problems)} problems has a prompt of at most {room} tokens, "
            "which is what reward.l_max leaves of the model's context and of rl.microbatch_tokens"
        )
    return kept


def pool_settings(config: Config) -> PoolSettings:
    recovery = config.generator.recovery
    return PoolSettings(
        suspect_s=recovery.suspect_s,
        restart_s=recovery.start_s,
        max_restarts=recovery.max_restarts,
        update_bound_s=recovery.update_bound_s,
        max_tries=recovery.max_request_tries,
        wait_s=recovery.request_wait_s,
    )


def ask_for_restart(config: Config, run: RunFolder) -> AskForRestart:
    """What the pool does about an engine that is silent: another process supervises it."""
    return AskForRestart(RestartRequests(run.restarts), config.generator.recovery.suspect_s)


async def ended_by_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """Do it; SIGTERM ends it as Ctrl-C does, so that what was sampled gets into the journal."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def leaves(error: BaseException) -> list[BaseException]:
    """What is at the bottom of groups of exceptions."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


@contextmanager
def told_in_a_line(expected: tuple[type[Exception], ...], log: logging.Logger) -> Iterator[None]:
    """The end of a role by failures of which all are `expected`: a line each in its log, and exit
    code FAILED. Others go on as they are, for their traceback."""
    try:
        yield
    except Exception as error:  # to tell a user what to do, where that is known
        causes = leaves(error)
        if not all(isinstance(cause, expected) for cause in causes):
            raise
        for cause in causes:
            log.error("%s", cause)
        raise typer.Exit(FAILED) from error


def reward_settings(config: Config) -> RewardSettings:
    return RewardSettings(**config.reward.model_dump(exclude={"num_code_tests"}))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path, typer.Option()],
    port: Annotated[int, typer.Option()],
    generators: Annotated[str, typer.Option(help="URLs, separated by commas")],
    host: Annotated[str, typer.Option(help="Where trainers reach us")] = "127.0.0.1",
    verifiers: Annotated[str, typer.Option(help="URLs; else the run folder's socket")] = "",
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request
    folder = RunFolder(run)
    addresses = verifiers.split(",") if verifiers else [f"unix:{folder.verifier_socket}"]
    try:
        with told_in_a_line(EXPECTED, log), folder.lock("controller"):
            controlling = control(
                load(folder.config), folder, host, port, generators.split(","), addresses
            )
            asyncio.run(ended_by_sigterm(controlling))
    except asyncio.CancelledError as error:
        raise typer.Exit(SIGNAL_BASE + signal.SIGTERM) from error


if __name__ == "__main__":
    app()
