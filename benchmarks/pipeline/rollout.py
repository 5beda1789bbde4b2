"""The product's rollout controller, with lengths that are drawn instead of left to the model.

Each completion is real: an engine samples token by token, with weights that change under it. Only
where it ends is decided beforehand, by a heavy-tailed distribution. A grader that answers at once
takes the place of the verifiers; every group has different rewards, so that none is dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoTokenizer

from megatron_magistral.analysis.lengths import Lengths, parse_lengths
from megatron_magistral.config_file import load
from megatron_magistral.data.datasets import Datasets, dataset_paths
from megatron_magistral.prompts import load_template
from megatron_magistral.rollout.completion import NewTokens
from megatron_magistral.rollout.controller import Controller
from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.generator import Generator, SamplingSettings
from megatron_magistral.rollout.role import fitting
from megatron_magistral.rollout.sglang_server import ModelLimits
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.types import Completion, Problem, Reward
from megatron_magistral.weights.architecture import read_architecture

LOADS_FILE = "loads.json"
"""[seconds since the epoch, requests in flight] at each change, of all engines."""
MAX_PROMPT_TOKENS = 128


class TailedGenerator(Generator):
    """Ends a completion after a length that is drawn for it. Requests come in the order in which
    groups are admitted, so that a seed gives every group its lengths."""

    def __init__(self, url: str, limits: ModelLimits, lengths: Lengths, seed: int) -> None:
        super().__init__(url, limits)
        self._lengths = lengths
        self._random = random.Random(seed)
        self.loads: list[tuple[float, int]] = [(time.time(), 0)]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        cache_salt: str,
        partial: Completion | None = None,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> Completion:
        length = max(1, round(self._lengths.sample(self._random)))
        sampling = replace(sampling, max_new_tokens=length, ignore_eos=True, stop_token_ids=())
        self._count(+1)
        try:
            return await super().generate(
                prompt_ids,
                sampling,
                cache_salt=cache_salt,
                partial=partial,
                on_tokens=on_tokens,
            )
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.loads.append((time.time(), self.loads[-1][1] + change))


async def grade(problem: Problem, completion: Completion, group: str) -> Reward:
    """Different for completions of different lengths or tokens."""
    share = hash(completion.output_ids) % 1000 / 1000
    return Reward(format=0.1, correctness=0.9 * share, language=0.0, length=0.0)


async def control(run: RunFolder, port: int, url: str, lengths: str) -> None:
    config = load(run.config)
    assert config.rl is not None
    model = run.rl_model(config)
    arch, tokenizer = read_architecture(model), AutoTokenizer.from_pretrained(model)
    limits = ModelLimits(arch.vocab_size, arch.max_position_embeddings)
    template = load_template(config.data.prompt_file)
    data = Datasets.read(dataset_paths(config, run))
    drawn = parse_lengths(lengths, config.reward.l_max)
    async with AsyncExitStack() as stack:
        engine = TailedGenerator(url, limits, drawn, config.run.seed)
        await stack.enter_async_context(engine)
        await engine.wait_ready(config.generator.start_timeout_s)
        controller = Controller(
            config,
            run,
            EnginePool([engine]),
            grade,
            tokenizer,
            template,
            fitting(data.train, tokenizer, template, MAX_PROMPT_TOKENS),
            fitting(data.held_out, tokenizer, template, MAX_PROMPT_TOKENS),
        )
        try:
            await controller.run("127.0.0.1", port)
        finally:
            (run.root / LOADS_FILE).write_text(json.dumps(engine.loads))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path, typer.Option()],
    port: Annotated[int, typer.Option()],
    generator: Annotated[str, typer.Option(help="Its URL")],
    lengths: Annotated[str, typer.Option()],
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(control(RunFolder(run), port, generator, lengths))


if __name__ == "__main__":
    app()
