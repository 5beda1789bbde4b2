"""Role `trainer`: one rank of the SFT or the RL stage. torchrun's variables say which."""

from __future__ import annotations

import functools
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
from megatron_magistral.signals import STOPPED
from megatron_magistral.trainer.candidates import CandidateWriter
from megatron_magistral.trainer.checkpoint import Checkpointer, StopRequested
from megatron_magistral.trainer.checkpoint_files import CheckpointError, CheckpointFolder
from megatron_magistral.trainer.feed import Feed, FeedError
from megatron_magistral.trainer.fingerprint import training_values
from megatron_magistral.trainer.layout import LayoutError, ParallelLayout
from megatron_magistral.trainer.loop import train_rl
from megatron_magistral.trainer.megatron_backend import BackendError
from megatron_magistral.trainer.nonfinite import NonFiniteSteps, NonFiniteWatch
from megatron_magistral.trainer.publish import PublishSettings, WeightPublisher
from megatron_magistral.trainer.settings import OptimizerSettings
from megatron_magistral.trainer.sft import StepHook, train_sft
from megatron_magistral.trainer.sft_data import EncodedTrace, encode_traces
from megatron_magistral.trainer.step import Trainer
from megatron_magistral.trainer.validation import Validator, split_traces
from megatron_magistral.weights.architecture import ArchitectureError, read_architecture
from megatron_magistral.weights.hf_dir import WeightsError, link_hf_dir
from megatron_magistral.weights.lane import LaneLost
from megatron_magistral.weights.link import LinkLost

log = logging.getLogger(__name__)

FAILED = 1

# What a user can act on needs no traceback.
ACTIONABLE = (
    *(ArchitectureError, BackendError, CheckpointError, FeedError, LaneLost, LayoutError),
    *(LinkLost, NonFiniteSteps, RunBusy, WeightsError),
)


def run_sft(config: Config, run: RunFolder, *, speaks: bool) -> None:
    assert config.sft is not None
    model = run.first_model(config)
    traces, held_out = sft_traces(config, run, model)
    num_steps = config.sft.total_steps(len(traces))
    trainer = make_trainer(config, model, config.sft.optimizer.settings(num_steps))
    hooks: list[StepHook] = []
    if held_out:
        hooks.append(Validator(trainer, held_out, config.sft, run.sft_model, run.sft_best))
    if config.selects:
        every_steps = config.sft.candidate_every_steps
        hooks.append(CandidateWriter(trainer, every_steps, run.sft_candidate))
    checkpoints = make_checkpointer(config, run, Stage.SFT, trainer)
    watch = make_watch(run, Stage.SFT, config.sft.optimizer.max_nonfinite_steps, trainer)
    start = checkpoints.restore()
    metrics = MetricsWriter(run.root, "sft", start.next_step) if speaks else None
    seed = config.run.seed
    train_sft(trainer, traces, config.sft, seed, checkpoints, watch, start, metrics, hooks)
    if metrics is not None:
        metrics.close()
    if not held_out:
        trainer.save_hf(run.sft_model)
    if config.rl is None and speaks:
        link_hf_dir(run.sft_model, run.model)
    trainer.close()


def sft_traces(
    config: Config, run: RunFolder, model: Path
) -> tuple[list[EncodedTrace], list[EncodedTrace]]:
    """(to train on, to validate with), as tokens."""
    assert config.sft is not None
    traces = Datasets.read(dataset_paths(config, run)).traces
    parts = split_traces(traces, config.sft.validation_fraction, config.run.seed)
    encode = functools.partial(
        encode_traces,
        tokenizer=AutoTokenizer.from_pretrained(model),
        template=load_template(config.data.prompt_file),
        max_tokens=min(
            config.sft.microbatch_tokens, read_architecture(model).max_position_embeddings
        ),
    )
    training, held_out = (encode(part) if part else [] for part in parts)
    return training, held_out


def run_rl(
    config: Config,
    run: RunFolder,
    *,
    controller: str,
    generators: list[str],
    host: str,
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
    settings = PublishSettings.of(config.generator, host)
    publisher = WeightPublisher(trainer, feed, config, generators, speaks=speaks, settings=settings)
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
    return Trainer.create(
        model,
        ParallelLayout.of(config.parallel),
        optimizer,
        dtype=getattr(torch, config.model.dtype),
        seed=config.run.seed,
        timeout_s=config.parallel.timeout_s,
        recompute=config.parallel.recompute,
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
        stop=run.stop_requested,
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
    host: Annotated[str, typer.Option(help="Where generators reach rank 0")] = "127.0.0.1",
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
                    host=host,
                    speaks=speaks,
                )
    except StopRequested as error:
        log.info("%s", error)
        raise typer.Exit(STOPPED) from error
    except ACTIONABLE as error:
        log.error("%s", error)
        raise typer.Exit(FAILED) from error


if __name__ == "__main__":
    app()
