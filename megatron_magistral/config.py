"""What a run is: frozen, typed, strict. What can be wrong is found here, before anything starts.

A config file is YAML with the sections of `Config`; `config_file.load` reads it. Every rule names
the key, the value and what would be right.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from megatron_magistral.config_engines import ChecksConfig, RecoveryConfig
from megatron_magistral.config_kv import KvRoom
from megatron_magistral.config_parallel import ParallelConfig
from megatron_magistral.config_section import Count, Positive, PositiveFloat, Section
from megatron_magistral.config_stages import (
    CheckpointConfig,
    RewardConfig,
    RlConfig,
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
    checks: ChecksConfig = ChecksConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    extra_arguments: tuple[str, ...] = ()
    """Passed to `sglang.launch_server` as they are."""


class VerifierConfig(Section):
    num_slots: Positive | None = None
    """Programs run at once; one a core if unset."""
    num_maths_workers: Positive = 1
    max_restarts: Count = 3
    """Of the service in a run, when it has ended; then the run ends."""
    timeout_s: PositiveFloat = 120.0
    """That verifiers have for one grading, retries included; then it is masked and counted."""
    outage_s: PositiveFloat = 600.0
    """If no verifier answers anything for so long, the run ends."""


class BestBy(StrEnum):
    """What of an evaluation decides which checkpoint is the best."""

    PASS_AT_1 = "pass_at_1"
    MEAN_REWARD = "mean_reward"


class EvalConfig(Section):
    every_steps: Count = 0
    """Steps of the RL stage between evaluations beside training; 0: at its start and end only. One
    of the generators keeps its version meanwhile."""
    best_by: BestBy = BestBy.PASS_AT_1
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
        problems = problems or _later_stage_problems(self)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def selects(self) -> bool:
        """Whether pass@1 decides which weights of the SFT stage are kept."""
        return self.sft is not None and self.sft.candidate_every_steps > 0

    @property
    def num_rl_stages(self) -> int:
        return 0 if self.rl is None else 1 + len(self.rl.stages)

    def kv_room(self, longest_before: int = 0) -> KvRoom:
        """Of the first stage; of a later one by `at_stage`, with the longest completion before."""
        rl = self.rl
        return KvRoom(
            cache_tokens=self.generator.max_total_tokens,
            budget_tokens=None if rl is None else rl.kv_budget_tokens,
            reserve=1.0 if rl is None else rl.kv_reserve,
            l_max=self.reward.l_max,
            longest=max(self.reward.l_max, longest_before),
        )

    @property
    def longest_completion(self) -> int:
        """Tokens: `reward.l_max` of the stage that allows the longest completions."""
        later = () if self.rl is None else self.rl.stages
        return max(self.reward.l_max, *(stage.l_max or 0 for stage in later), 0)

    def at_stage(self, index: int) -> Config:
        """What holds while stage `index` of `rl.stages` lasts, 0 being the first, as a config that
        has no later stages."""
        assert self.rl is not None, "a run without RL has no stages"
        values = self.model_dump()
        for stage in self.rl.stages[:index]:
            for section, overlay in stage.overlay().items():
                values[section] |= overlay
        values["rl"]["stages"] = ()
        return Config.model_validate(values)

    def warnings(self) -> list[str]:
        """What is unusual though allowed, with the paper's setting, of every stage of RL."""
        if self.rl is None:
            return []
        found = _rl_warnings(self, self.rl)
        for index in range(len(self.rl.stages)):
            later = self.at_stage(index + 1).warnings()
            found += [f"rl.stages.{index}: {warning}" for warning in later]
        return found


def _rl_warnings(config: Config, rl: RlConfig) -> list[str]:
    found = []
    if rl.n_async > 2 * rl.n_batch:
        found.append(
            f"rl.n_async / rl.n_batch = {rl.n_async / rl.n_batch:.2f}: the paper keeps it at 2 or "
            "less, beyond that the data is too far off-policy"
        )
    bound = rl.max_staleness
    if bound is not None and bound * rl.n_batch < rl.n_async:
        found.append(
            f"rl.max_staleness = {bound}: while a step trains, at most {bound} x n_batch = "
            f"{bound * rl.n_batch} sequences may be under way, so generators are held below "
            f"rl.n_async = {rl.n_async}"
        )
    if rl.n_minibatch < rl.n_batch:
        found.append(
            f"rl.n_minibatch = {rl.n_minibatch} < rl.n_batch = {rl.n_batch}: the paper sets them "
            "equal, more optimizer steps on a batch are less stable"
        )
    return found + config.kv_room().warnings(rl.n_async, config.generator.num_replicas)


def _stage_problems(config: Config) -> list[str]:
    problems = []
    if config.sft is None and config.rl is None:
        problems.append("sft, rl: give at least one of the two stages")
    if config.sft is not None and config.data.tiny_world is None and config.data.traces is None:
        problems.append("data.traces = null: the sft stage needs a JSONL of traces")
    if config.selects and config.data.train is not None and config.data.held_out is None:
        problems.append(
            "data.held_out = null: sft.candidate_every_steps needs held-out problems to choose with"
        )
    if config.rl is not None or config.selects:
        problems += config.kv_room().problems()
    if config.rl is None:
        return problems
    if config.rl.microbatch_tokens <= config.reward.l_max:
        problems.append(
            f"rl.microbatch_tokens = {config.rl.microbatch_tokens} must hold a prompt and a whole "
            f"completion: more than reward.l_max = {config.reward.l_max}"
        )
    problems += config.generator.recovery.problems(config.parallel.timeout_s)
    data_ranks = config.parallel.data
    if config.rl.n_minibatch % data_ranks:
        problems.append(
            f"rl.n_minibatch = {config.rl.n_minibatch} must be a multiple of "
            f"parallel.data = {data_ranks}"
        )
    problems += _evaluation_problems(config)
    if config.data.train is not None and config.data.held_out is None:
        problems.append("data.held_out = null: the rl stage evaluates on held-out problems")
    return problems


def _later_stage_problems(config: Config) -> list[str]:
    """Every rule of a config holds for each of its stages."""
    if config.rl is None:
        return []
    problems = []
    ratio = config.rl.num_minibatches
    longest = config.reward.l_max
    for index in range(len(config.rl.stages)):
        try:
            stage = config.at_stage(index + 1)
        except ValidationError as error:
            messages = (item["msg"].removeprefix("Value error, ") for item in error.errors())
            problems += [f"rl.stages.{index}: {message}" for message in messages]
            continue
        rl = stage.rl
        assert rl is not None
        if longest > stage.reward.l_max:
            problems += [f"rl.stages.{index}: {p}" for p in stage.kv_room(longest).problems()]
        longest = max(longest, stage.reward.l_max)
        before = config.at_stage(index).rl
        assert before is not None
        if rl.max_staleness is not None and rl.n_batch < before.n_batch:
            problems.append(
                f"rl.stages.{index}: n_batch = {rl.n_batch} is less than the {before.n_batch} "
                f"before it, which rl.max_staleness = {rl.max_staleness} does not allow: groups "
                "that are under way then would be trained too late"
            )
        if rl.num_minibatches != ratio:
            problems.append(
                f"rl.stages.{index}: n_batch / n_minibatch = {rl.num_minibatches}, before it is "
                f"{ratio}: it must stay the same, so scale n_minibatch with n_batch"
            )
    return problems


def _evaluation_problems(config: Config) -> list[str]:
    every_steps = config.evaluation.every_steps
    if not every_steps:
        return []
    problems = []
    if config.generator.num_replicas < 2:
        problems.append(
            f"evaluation.every_steps = {every_steps} needs generator.num_replicas >= 2: one keeps "
            f"its version, another goes on with newer ones (now {config.generator.num_replicas})"
        )
    saved_every = config.checkpoint.rl_every_steps
    if not saved_every or every_steps % saved_every:
        problems.append(
            f"evaluation.every_steps = {every_steps} must be a multiple of "
            f"checkpoint.rl_every_steps = {saved_every}"
            + (": " if saved_every else ", which saves none before the end: ")
            + "else the best step has no checkpoint"
        )
    return problems


def _layout_problems(config: Config) -> list[str]:
    shape = config.model.shape
    if shape is None:
        return []
    problems = []
    if config.parallel.expert > 1:
        problems.append(
            f"parallel.expert = {config.parallel.expert} must be 1: model.shape has no experts"
        )
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
    pipeline, chunks = config.parallel.pipeline, config.parallel.virtual_pipeline
    if shape.num_layers % (pipeline * chunks):
        by_chunks = f" x parallel.virtual_pipeline = {chunks}" if chunks > 1 else ""
        problems.append(
            f"model.shape.num_layers = {shape.num_layers} must be a multiple of "
            f"parallel.pipeline = {pipeline}{by_chunks}"
        )
    if shape.context_length <= config.reward.l_max:
        problems.append(
            f"model.shape.context_length = {shape.context_length} must hold a prompt and "
            f"reward.l_max = {config.reward.l_max} tokens"
        )
    return problems
