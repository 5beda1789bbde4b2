"""Role `controller`: connects the controller of a run to its engines and verifiers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_magistral.config import Config
from megatron_magistral.config_file import load
from megatron_magistral.data.datasets import Datasets, dataset_paths
from megatron_magistral.prompts import load_template, longest_prompt, render_prompt
from megatron_magistral.rewards.language import fasttext_identifier
from megatron_magistral.rewards.settings import RewardSettings
from megatron_magistral.rollout.controller import Controller
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.generator import Generator
from megatron_magistral.rollout.grader import RewardGrader
from megatron_magistral.rollout.sglang_server import ModelLimits
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.types import Problem
from megatron_magistral.weights.architecture import read_architecture
from verifier_sandbox.client import VerifierClient

log = logging.getLogger(__name__)


async def control(config: Config, run: RunFolder, port: int, urls: Sequence[str]) -> None:
    assert config.rl is not None
    tokenizer = AutoTokenizer.from_pretrained(run.rl_model(config))
    arch = read_architecture(run.rl_model(config))
    limits = ModelLimits(arch.vocab_size, arch.max_position_embeddings)
    template = load_template(config.data.prompt_file)
    datasets = Datasets.read(dataset_paths(config, run))
    room = longest_prompt(limits.context_length, config.rl.microbatch_tokens, config.reward.l_max)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                Generator(
                    url,
                    limits,
                    decode=decode,
                    stall_timeout_s=config.generator.request_timeout_s,
                )
            )
            for url in urls
        ]
        await asyncio.gather(*(e.wait_ready(config.generator.start_timeout_s) for e in engines))
        verifiers = VerifierClient([f"unix:{run.verifier_socket}"])
        stack.push_async_callback(verifiers.close)
        controller = Controller(
            config,
            run,
            EnginePool(engines),
            RewardGrader(
                verifiers,
                fasttext_identifier(),
                reward_settings(config),
                num_code_tests=config.reward.num_code_tests,
                timeout_s=config.verifier.timeout_s,
            ),
            tokenizer,
            template,
            fitting(datasets.train, tokenizer, template, room),
            fitting(datasets.held_out, tokenizer, template, room),
        )
        await controller.run("127.0.0.1", port)


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


def reward_settings(config: Config) -> RewardSettings:
    return RewardSettings(**config.reward.model_dump(exclude={"num_code_tests"}))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path, typer.Option()],
    port: Annotated[int, typer.Option()],
    generators: Annotated[str, typer.Option(help="URLs, separated by commas")],
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request
    folder = RunFolder(run)
    with folder.lock("controller"):
        asyncio.run(control(load(folder.config), folder, port, generators.split(",")))


if __name__ == "__main__":
    app()
