"""Runs of the whole system, each in one mode: a server, the controller and a real trainer."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from megatron_magistral.analysis.pipeline_model import Mode
from megatron_magistral.cluster import Role, Supervisor, free_ports, python_module, trainer_roles
from megatron_magistral.config import Config
from megatron_magistral.config_file import dump, parse
from megatron_magistral.data.datasets import Datasets, dataset_paths
from megatron_magistral.prompts import load_template, render_prompt
from megatron_magistral.role_commands import generator_settings, prepare_command, trainer_command
from megatron_magistral.rollout.sglang_server import (
    Device,
    ModelLimits,
    detect_device,
    server_command,
    server_environment,
)
from megatron_magistral.run_folder import RunFolder, Stage

PREPARE_S = 300.0
SEED = 0
# What a group may add to the prompt of a completion.
PROMPT_ROOM_TOKENS = 256


@dataclass(frozen=True)
class Options:
    """Counts are completions; `n_async` and `queue_size` are those of the asynchronous run, the
    others have a batch in flight and no queue. The first `num_warm_up` steps are not measured."""

    n_batch: int
    n_async: int
    queue_size: int
    group_size: int
    l_max: int
    lengths: str
    num_steps: int
    num_async_steps: int
    num_warm_up: int
    timeout_s: float

    def steps_of(self, mode: Mode) -> int:
        """Asynchronous steps take less time, so that more of them are needed for the same."""
        return self.num_async_steps if mode is Mode.ASYNCHRONOUS else self.num_steps


def config_of(options: Options, mode: Mode, folder: Path) -> Config:
    """A model so small that two cores serve and train it. Raises ConfigError."""
    context = options.l_max + PROMPT_ROOM_TOKENS
    limits: dict[Mode, dict[str, Any]] = {
        Mode.ASYNCHRONOUS: {"n_async": options.n_async, "queue_size": options.queue_size},
        # Room for less than a group beyond the batch that is being generated.
        Mode.ONE_STEP_OFF: {"n_async": options.n_batch, "queue_size": 1},
        Mode.SYNCHRONOUS: {"n_async": options.n_batch, "queue_size": 1, "max_staleness": 0},
    }
    prompt = folder / "prompt.txt"
    prompt.write_text("{problem}\n", encoding="utf-8")
    return parse(
        {
            "run": {"name": mode.value, "directory": str(folder), "seed": SEED},
            "model": {
                "dtype": "float32",
                "shape": {
                    "hidden_size": 64,
                    "num_layers": 2,
                    "num_heads": 4,
                    "num_kv_heads": 2,
                    "ffn_size": 192,
                    "vocab_size": 512,
                    "context_length": context,
                },
            },
            "data": {
                "tiny_world": {"num_train": 256, "num_held_out": 8, "num_traces": 256},
                "prompt_file": str(prompt),
            },
            "rl": {
                "num_steps": options.steps_of(mode),
                "group_size": options.group_size,
                "n_batch": options.n_batch,
                "n_minibatch": options.n_batch,
                "microbatch_tokens": 2 * context,
                "batch_timeout_s": options.timeout_s,
                "optimizer": {"lr": 1e-5},
                "keep_samples": 0,
                **limits[mode],
            },
            "reward": {"l_max": options.l_max, "l_cache": options.l_max // 4},
            "checkpoint": {"rl_every_steps": 0},
            "generator": {
                "dtype": "float32",
                "max_total_tokens": 64 * context,
                # No two runs or versions share a prefix: only what is sampled counts.
                "extra_arguments": ["--disable-radix-cache"],
            },
            "evaluation": {"num_problems": 1, "num_samples": 1},
        }
    )


@dataclass(frozen=True)
class Prepared:
    """A run folder with data and a model, which others copy."""

    run: RunFolder
    config: Config
    prompt_tokens: float
    """Mean length of a prompt."""

    @property
    def limits(self) -> ModelLimits:
        assert self.config.model.shape is not None
        shape = self.config.model.shape
        return ModelLimits(shape.vocab_size, shape.context_length)


def prepare(options: Options, folder: Path) -> Prepared:
    config = config_of(options, Mode.ASYNCHRONOUS, folder)
    run = new_run(config, folder / "prepared")
    with Supervisor() as supervisor:
        supervisor.start(
            Role("prepare", prepare_command(run), run.log("prepare"), dict(os.environ))
        )
        supervisor.wait_for(["prepare"], timeout_s=PREPARE_S)
    tokenizer = AutoTokenizer.from_pretrained(run.rl_model(config))
    template = load_template(config.data.prompt_file)
    problems = Datasets.read(dataset_paths(config, run)).train
    lengths = [len(tokenizer.encode(render_prompt(p.statement, template))) for p in problems]
    return Prepared(run, config, statistics.fmean(lengths))


def new_run(config: Config, root: Path) -> RunFolder:
    for name in ("logs", "models"):
        (root / name).mkdir(parents=True)
    run = RunFolder(root)
    run.config.write_text(dump(config), encoding="utf-8")
    return run


@contextmanager
def serving(options: Options, prepared: Prepared) -> Iterator[str]:
    """The URL of a server that every run uses, one after the other."""
    run, config = prepared.run, prepared.config
    assert config.model.shape is not None
    (port,) = free_ports(1)
    context_length = config.model.shape.context_length
    first_gpu = config.parallel.world_size if detect_device() is Device.CUDA else None
    settings = generator_settings(
        config, run, port=port, context_length=context_length, base_gpu_id=first_gpu
    )
    server = Role(
        "generator",
        tuple(server_command(settings)),
        run.log("generator"),
        server_environment(settings, os.environ),
    )
    with Supervisor() as supervisor:
        supervisor.start(server)
        yield settings.url


def run_mode(options: Options, mode: Mode, prepared: Prepared, root: Path, url: str) -> RunFolder:
    """Every step in this mode, on a server that nobody else uses.

    Raises RoleFailed or StageTimeout.
    """
    config = config_of(options, mode, root.parent)
    run = new_run(config, root)
    for name in ("data", "models"):
        shutil.copytree(prepared.run.root / name, run.root / name, dirs_exist_ok=True)
    rendezvous, port = free_ports(2)
    command = python_module(
        "benchmarks.pipeline.rollout",
        *("--run", str(run.root), "--port", str(port)),
        *("--generator", url, "--lengths", options.lengths),
    )
    controller = Role("controller", command, run.log("controller"), dict(os.environ))
    trainer = trainer_command(
        run, Stage.RL, controller=f"http://127.0.0.1:{port}", generators=[url]
    )
    ranks = trainer_roles(trainer, config.parallel.world_size, run.log, port=rendezvous)
    with Supervisor() as supervisor:
        supervisor.start(controller)
        for rank in ranks:
            # A core of its own, as the server has: on a cluster they do not share GPUs either.
            environment = {**rank.environment, "OMP_NUM_THREADS": "1"}
            supervisor.start(replace(rank, environment=environment))
        supervisor.wait_for(["controller", *(r.name for r in ranks)], timeout_s=options.timeout_s)
    return run
