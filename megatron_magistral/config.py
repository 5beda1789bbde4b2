"""What a run is: frozen, typed, strict. What can be wrong is found here, before anything starts.

A config file is YAML with the sections of `Config`; `config_file.load` reads it. Every rule names
the key, the value and what would be right.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_magistral.algorithm.settings import (
    AlgorithmSettings,
    NormaliseAdvantage,
    NormaliseLoss,
)
from megatron_magistral.trainer.settings import OptimizerSettings, Schedule

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


class DType(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "run"
    directory: Path = Path("runs")
    """Where run folders are made: <directory>/<name>-<time>."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


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
    timeout_s: PositiveFloat = 600.0
    """After which a collective that some rank did not join is an error."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data


class OptimizerConfig(Section):
    lr: PositiveFloat
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: Count = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _min_lr(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} must not exceed lr = {self.lr}")
        return self

    def settings(self, total_steps: int) -> OptimizerSettings:
        return OptimizerSettings(total_steps=total_steps, **self.model_dump())


class SftConfig(Section):
    num_steps: Positive
    batch_size: Positive
    """Sequences a step."""
    microbatch_tokens: Positive
    optimizer: OptimizerConfig


class RewardConfig(Section):
    """Section 2.2 of the paper."""

    format: Fraction = 0.1
    correctness: Fraction = 0.9
    language: Fraction = 0.1
    length_penalty: Fraction = 0.1
    l_max: Positive
    """Longest completion, tokens; at and beyond it the whole length penalty is due."""
    l_cache: Positive
    """The penalty grows linearly over the last l_cache tokens."""
    proportional_code: bool = False
    """Pay code by its share of passed tests (an ablation of section 6)."""
    num_code_tests: Positive = 20

    @model_validator(mode="after")
    def _cache_below_max(self) -> Self:
        if self.l_cache >= self.l_max:
            raise ValueError(f"l_cache = {self.l_cache} must be less than l_max = {self.l_max}")
        return self


class AlgorithmConfig(Section):
    """Section 2.1 of the paper with the switches of its ablations."""

    eps_low: PositiveFloat = 0.2
    eps_high: PositiveFloat = 0.28
    normalise_advantage: NormaliseAdvantage = NormaliseAdvantage.MINIBATCH
    normalise_loss: NormaliseLoss = NormaliseLoss.GROUP
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """KL to the moving average of the weights; 0: no reference model (modification 1)."""
    ema_decay: Fraction = 0.99
    recompute_old_logprobs: bool = False
    """Take pi_old from the trainer's own forward pass instead of the generator's record."""
    tis_cap: PositiveFloat | None = None
    """Cap of a truncated importance weight between trainer and generator; not in the paper."""

    @model_validator(mode="after")
    def _cap_needs_recompute(self) -> Self:
        if self.tis_cap is not None and not self.recompute_old_logprobs:
            raise ValueError(
                f"tis_cap = {self.tis_cap} needs recompute_old_logprobs = true: without it pi_old "
                "is the generator's own record and there is no gap to correct"
            )
        return self

    def settings(self, num_minibatches: int) -> AlgorithmSettings:
        return AlgorithmSettings(num_minibatches=num_minibatches, **self.model_dump())


class RlConfig(Section):
    num_steps: Positive
    group_size: Annotated[int, Field(ge=2)] = 16
    """G, completions of one prompt."""
    n_batch: Positive
    """Completions of one step."""
    n_minibatch: Positive
    """Completions of one optimizer step; the paper sets n_minibatch = n_batch."""
    n_async: Positive
    """Sequences kept in flight at the generators."""
    queue_size: Positive | None = None
    """Completions that may wait for the trainer before generators are held back [n_batch]."""
    microbatch_tokens: Positive
    """Token budget of a microbatch, prompts included."""
    batch_timeout_s: PositiveFloat = 3600.0
    """Longest wait of a trainer for a batch."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig
    weight_bucket_mib: PositiveFloat = 512.0
    keep_samples: Count = 4
    """Completions of each step written to samples.jsonl."""

    @property
    def queue_capacity(self) -> int:
        return self.queue_size or self.n_batch

    @property
    def num_minibatches(self) -> int:
        return self.n_batch // self.n_minibatch

    @property
    def groups_per_batch(self) -> int:
        return self.n_batch // self.group_size

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        problems = []
        for name, value in (("n_batch", self.n_batch), ("n_minibatch", self.n_minibatch)):
            if value % self.group_size:
                problems.append(
                    f"{name} = {value} must be a multiple of group_size = {self.group_size}"
                )
        if self.n_batch % self.n_minibatch:
            problems.append(
                f"n_batch = {self.n_batch} must be a multiple of n_minibatch = {self.n_minibatch}"
            )
        if self.n_async + self.queue_capacity < self.n_batch:
            problems.append(
                f"n_async + queue_size = {self.n_async} + {self.queue_capacity} must be at least "
                f"n_batch = {self.n_batch}: else a batch can never fill"
            )
        if self.n_async < self.group_size:
            problems.append(
                f"n_async = {self.n_async} must be at least group_size = {self.group_size}"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


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
