"""Role `trainer`: one rank of the SFT or the RL stage. torchrun's variables say which."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from megatron_magistral.config import Config
from megatron_magistral.config_file import load
from megatron_magistral.data.datasets import Datasets, dataset_paths
from megatron_magistral.metrics import MetricsWriter
from megatron_magistral.prompts import load_template
from megatron_magistral.run_folder import RunBusy, RunFolder, Stage
from megatron_magistral.trainer.checkpoint import Checkpointer
from megatron_magistral.trainer.checkpoint_files import CheckpointError, CheckpointFolder
from megatron_magistral.trainer.feed import Feed
from megatron_magistral.trainer.fingerprint import training_values
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.loop import train_rl
from megatron_magistral.trainer.nonfinite import NonFiniteSteps, NonFiniteWatch
from megatron_magistral.trainer.publish import WeightPublisher
from megatron_magistral.trainer.settings import OptimizerSettings
from megatron_magistral.trainer.sft import encode_traces, train_sft
from megatron_magistral.trainer.step import Trainer

log = logging.getLogger(__name__)

FAILED = 1


def run_sft(config: Config, run: RunFolder, *, speaks: bool) -> None:
    assert config.sft is not None
    model = run.first_model(config)
    trainer = make_trainer(config, model, config.sft.optimizer.settings(config.sft.num_steps))
    traces = encode_traces(
        Datasets.read(dataset_paths(config, run)).traces,
        AutoTokenizer.from_pretrained(model),
        load_template(config.data.prompt_file),
        max_tokens=min(config.sft.microbatch_tokens, trainer.arch.max_position_embeddings),
    )
    checkpoints = make_checkpointer(config, run, Stage.SFT, trainer)
    watch = make_watch(run, Stage.SFT, config.sft.optimizer.max_nonfinite_steps, trainer)
    start = checkpoints.restore()
    metrics = MetricsWriter(run.root, "sft", start.next_step) if speaks else None
    train_sft(trainer, traces, config.sft, config.run.seed, checkpoints, watch, start, metrics)
    if metrics is not None:
        metrics.close()
    trainer.save_hf(run.sft_model)
    if config.rl is None:
        trainer.save_hf(run.model)
    trainer.close()


def run_rl(
    config: Config,
    run: RunFolder,
    *,
    controller: str,
    generators: list[str],
    speaks: bool,
) -> None:
    assert config.rl is not None
    trainer = make_trainer(
        config,
        run.rl_model(config),
        config.rl.optimizer.settings(config.rl.num_steps * config.rl.num_minibatches),
        ema_decay=config.rl.algorithm.ema_decay if config.rl.algorithm.kl_coef > 0 else None,
    )
    feed = Feed(controller, batch_timeout_s=config.rl.batch_timeout_s)
    publisher = WeightPublisher(trainer, feed, config, generators, speaks=speaks)
    checkpoints = make_checkpointer(config, run, Stage.RL, trainer)
    watch = make_watch(run, Stage.RL, config.rl.optimizer.max_nonfinite_steps, trainer)
    train_rl(trainer, feed, publisher, config.rl, checkpoints, watch, speaks=speaks)
    trainer.save_hf(run.model)
    publisher.close()
    feed.close()
    trainer.close()


def make_trainer(
    config: Config,
    model: Path,
    optimizer: OptimizerSettings,
    *,
    ema_decay: float | None = None,
) -> Trainer:
    parallel = config.parallel
    return Trainer.create(
        model,
        ParallelLayout(
            tp=parallel.tensor,
            pp=parallel.pipeline,
            dp=parallel.data,
            sequence_parallel=parallel.sequence,
        ),
        optimizer,
        dtype=getattr(torch, config.model.dtype),
        seed=config.run.seed,
        timeout_s=parallel.timeout_s,
        recompute=parallel.recompute,
        ema_decay=ema_decay,
    )


def make_checkpointer(
    config: Config, run: RunFolder, stage: Stage, trainer: Trainer
) -> Checkpointer:
    settings = config.checkpoint
    every_steps = {Stage.SFT: settings.sft_every_steps, Stage.RL: settings.rl_every_steps}
    return Checkpointer(
        trainer,
        CheckpointFolder(run.checkpoints(stage)),
        settings,
        every_steps=every_steps[stage],
        training=training_values(config, stage),
    )


def make_watch(run: RunFolder, stage: Stage, max_steps: int, trainer: Trainer) -> NonFiniteWatch:
    mesh = trainer.mesh
    keeps = mesh.tp_rank == 0 and mesh.pp_rank == 0
    return NonFiniteWatch(stage, max_steps, run.nonfinite if keeps else None, mesh.dp_rank)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path, typer.Option()],
    stage: Annotated[Stage, typer.Option()],
    controller: Annotated[str, typer.Option()] = "",
    generators: Annotated[str, typer.Option(help="URLs, separated by commas")] = "",
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request
    folder = RunFolder(run)
    config = load(folder.config)
    speaks = int(os.environ["RANK"]) == 0
    try:
        with folder.lock("trainer") if speaks else nullcontext():
            if stage is Stage.SFT:
                run_sft(config, folder, speaks=speaks)
            else:
                assert stage is Stage.RL, f"trainers have no part in stage {stage}"
                run_rl(
                    config,
                    folder,
                    controller=controller,
                    generators=generators.split(","),
                    speaks=speaks,
                )
    except (CheckpointError, NonFiniteSteps, RunBusy) as error:
        # What a user can act on needs no traceback.
        log.error("%s", error)
        raise typer.Exit(FAILED) from error


if __name__ == "__main__":
    app()
