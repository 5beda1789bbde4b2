"""What a run is: frozen, typed, strict. What can be wrong is found here, before anything starts.

A config file is YAML with the sections of `Config`; `config_file.load` reads it. Every rule names
the key, the value and what would be right.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from megatron_magistral.config_stages import (
    CheckpointConfig,
    Positive,
    PositiveFloat,
    RewardConfig,
    RlConfig,
    Section,
    SftConfig,
)


class DType(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "run"
    directory: Path = Path("runs")
    """Where run folders are made: <directory>/<name>-<time>; `~` is the home directory."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @field_validator("directory")
    @classmethod
    def _home(cls, directory: Path) -> Path:
        return directory.expanduser()


class ModelShape(Section):
    """A Mistral-shaped decoder, initialised at random with a tokenizer of its own."""

    hidden_size: Positive = 128
    num_layers: Positive = 4
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    ffn_size: Positive = 384
    vocab_size: Annotated[int, Field(ge=261)] = 1024
    """At least the 256 bytes and five tokens with a meaning."""
    context_length: Positive = 512
    tied_embeddings: bool = True


class ModelConfig(Section):
    path: Path | None = None
    """A Hugging Face directory (config.json, tokenizer, safetensors); or `shape` instead."""
    shape: ModelShape | None = None
    dtype: DType = DType.BFLOAT16
    """Of the trainer's weights; the optimizer always keeps fp32 masters."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.shape is None):
            raise ValueError("give exactly one of model.path and model.shape")
        return self


class TinyWorldConfig(Section):
    """The generated problems of `megatron_magistral.data.tiny_world`."""

    num_train: Positive = 4096
    num_held_out: Positive = 256
    num_traces: Positive = 4096


class DataConfig(Section):
    tiny_world: TinyWorldConfig | None = None
    train: Path | None = None
    """JSONL of problems (see data/schema.py)."""
    held_out: Path | None = None
    traces: Path | None = None
    """JSONL of supervised traces, for the SFT stage."""
    prompt_file: Path | None = None
    """Replaces the system prompt; must hold `{problem}` exactly once."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.tiny_world is None) == (self.train is None):
            raise ValueError("give exactly one of data.tiny_world and data.train")
        return self


class ParallelConfig(Section):
    """The trainer's layout; its world size is tensor x pipeline x data."""

    tensor: Positive = 1
    pipeline: Positive = 1
    data: Positive = 1
    sequence: bool = True
    """Sequence parallelism (only has an effect where tensor > 1)."""
    recompute: bool = False
    """Keep only the inputs of layers for the backward pass: less memory, a third more work."""
    timeout_s: PositiveFloat = 600.0
    """After which a collective that some rank did not join is an error."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data


class GeneratorConfig(Section):
    num_replicas: Positive = 1
    tensor_parallel: Positive = 1
    dtype: DType = DType.BFLOAT16
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Of the first replica; 0 takes free ones."""
    max_total_tokens: Positive | None = None
    """KV cache of one replica, tokens; SGLang's own choice if unset."""
    start_timeout_s: PositiveFloat = 600.0
    request_timeout_s: PositiveFloat = 1800.0
    update_timeout_s: PositiveFloat = 300.0
    extra_arguments: tuple[str, ...] = ()
    """Passed to `sglang.launch_server` as they are."""


class VerifierConfig(Section):
    num_slots: Positive | None = None
    """Programs run at once; one a core if unset."""
    num_maths_workers: Positive = 1
    timeout_s: PositiveFloat = 120.0
    """For one grading, retries included; then the sample is masked and counted."""


class EvalConfig(Section):
    num_problems: Positive = 256
    num_samples: Positive = 4
    """Completions a problem; pass@1 is their mean."""
    temperature: PositiveFloat = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    sft: SftConfig | None = None
    rl: RlConfig | None = None
    reward: RewardConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    generator: GeneratorConfig = GeneratorConfig()
    verifier: VerifierConfig = VerifierConfig()
    evaluation: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        problems = [*_stage_problems(self), *_layout_problems(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def warnings(self) -> list[str]:
        """What is unusual though allowed, with the paper's setting."""
        found = []
        if self.rl is not None:
            if self.rl.n_async > 2 * self.rl.n_batch:
                found.append(
                    f"rl.n_async / rl.n_batch = {self.rl.n_async / self.rl.n_batch:.2f}: the paper "
                    "keeps it at 2 or less, beyond that the data is too far off-policy"
                )
            if self.rl.n_minibatch < self.rl.n_batch:
                found.append(
                    f"rl.n_minibatch = {self.rl.n_minibatch} < rl.n_batch = {self.rl.n_batch}: the "
                    "paper sets them equal, more optimizer steps on a batch are less stable"
                )
        return found


def _stage_problems(config: Config) -> list[str]:
    problems = []
    if config.sft is None and config.rl is None:
        problems.append("sft, rl: give at least one of the two stages")
    if config.sft is not None and config.data.tiny_world is None and config.data.traces is None:
        problems.append("data.traces = null: the sft stage needs a JSONL of traces")
    if config.rl is None:
        return problems
    if config.rl.microbatch_tokens <= config.reward.l_max:
        problems.append(
            f"rl.microbatch_tokens = {config.rl.microbatch_tokens} must hold a prompt and a whole "
            f"completion: more than reward.l_max = {config.reward.l_max}"
        )
    data_ranks = config.parallel.data
    if config.rl.n_minibatch % data_ranks:
        problems.append(
            f"rl.n_minibatch = {config.rl.n_minibatch} must be a multiple of "
            f"parallel.data = {data_ranks}"
        )
    if config.data.train is not None and config.data.held_out is None:
        problems.append("data.held_out = null: the rl stage evaluates on held-out problems")
    return problems


def _layout_problems(config: Config) -> list[str]:
    shape = config.model.shape
    if shape is None:
        return []
    problems = []
    for degree_name, degree in (
        ("parallel.tensor", config.parallel.tensor),
        ("generator.tensor_parallel", config.generator.tensor_parallel),
    ):
        for key in ("num_heads", "num_kv_heads", "ffn_size"):
            value = getattr(shape, key)
            if value % degree:
                problems.append(
                    f"model.shape.{key} = {value} must be a multiple of {degree_name} = {degree}"
                )
    if shape.hidden_size % shape.num_heads:
        problems.append(
            f"model.shape.hidden_size = {shape.hidden_size} must be a multiple of "
            f"model.shape.num_heads = {shape.num_heads}"
        )
    elif shape.hidden_size // shape.num_heads % 2:
        problems.append(
            f"model.shape.hidden_size = {shape.hidden_size} over model.shape.num_heads = "
            f"{shape.num_heads} must give heads of even size, which RoPE turns in pairs"
        )
    if shape.num_heads % shape.num_kv_heads:
        problems.append(
            f"model.shape.num_heads = {shape.num_heads} must be a multiple of "
            f"model.shape.num_kv_heads = {shape.num_kv_heads}"
        )
    if shape.num_layers % config.parallel.pipeline:
        problems.append(
            f"model.shape.num_layers = {shape.num_layers} must be a multiple of "
            f"parallel.pipeline = {config.parallel.pipeline}"
        )
    if shape.context_length <= config.reward.l_max:
        problems.append(
            f"model.shape.context_length = {shape.context_length} must hold a prompt and "
            f"reward.l_max = {config.reward.l_max} tokens"
        )
    return problems
