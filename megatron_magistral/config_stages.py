"""The stages of a run: what they train, how they save it. Sections of `config.Config`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from megatron_magistral.algorithm.entropy import EntropyControl
from megatron_magistral.algorithm.settings import (
    AlgorithmSettings,
    NormaliseAdvantage,
    NormaliseLoss,
)
from megatron_magistral.config_curriculum import RlStageConfig
from megatron_magistral.config_entropy import EntropyConfig
from megatron_magistral.config_section import (
    Count,
    Fraction,
    Positive,
    PositiveFloat,
    Section,
)
from megatron_magistral.trainer.settings import OptimizerSettings, Schedule
from megatron_magistral.weights.settings import PlanKind


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
    max_nonfinite_steps: Positive = 3
    """A step whose loss or gradient is not finite is skipped; so many in a row end the run."""

    @model_validator(mode="after")
    def _min_lr(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} must not exceed lr = {self.lr}")
        return self

    def settings(self, total_steps: int) -> OptimizerSettings:
        return OptimizerSettings(
            total_steps=total_steps, **self.model_dump(exclude={"max_nonfinite_steps"})
        )


class SftConfig(Section):
    num_steps: Positive | None = None
    num_epochs: Positive | None = None
    """Passes over the traces, instead of num_steps."""
    batch_size: Positive
    """Sequences a step."""
    microbatch_tokens: Positive
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the problems whose traces are held out. The stage then ends with the weights that
    had the least loss on them; 0: no validation, the last weights."""
    validate_every_steps: Positive = 100
    """The last step is validated too."""
    candidate_every_steps: Count = 0
    """Steps between two copies of the weights, of which the stage `selection` keeps those with the
    best pass@1 on held-out problems; the last weights are one too. 0: no such stage."""
    optimizer: OptimizerConfig

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ValueError("give exactly one of num_steps and num_epochs")
        return self

    @property
    def length(self) -> tuple[str, int]:
        """The key that says how long the stage goes on, and its value."""
        if self.num_steps is not None:
            return "num_steps", self.num_steps
        assert self.num_epochs is not None
        return "num_epochs", self.num_epochs

    def total_steps(self, num_traces: int) -> int:
        """Optimizer steps of the stage; a last batch that is not full is filled from the traces of
        a further epoch."""
        key, length = self.length
        return length if key == "num_steps" else -(-length * num_traces // self.batch_size)


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
    """Pay code by its share of passed tests (an ablation of section 7.4.1)."""
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
    entropy: EntropyConfig = EntropyConfig()
    """Moves eps_high."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """KL to the moving average of the weights; 0: no reference model (modification 1)."""
    ema_decay: Fraction = 0.99
    recompute_old_logprobs: bool = False
    """Take pi_old from the trainer's own forward pass instead of the generator's record."""
    tis_cap: PositiveFloat | None = None
    """Cap of a truncated importance weight between trainer and generator; not in the paper."""

    @model_validator(mode="after")
    def _eps_high_in_its_band(self) -> Self:
        low, high = self.entropy.eps_high_min, self.entropy.eps_high_max
        if self.entropy.control is not EntropyControl.OFF and not low <= self.eps_high <= high:
            raise ValueError(
                f"eps_high = {self.eps_high} must lie between entropy.eps_high_min = {low} and "
                f"entropy.eps_high_max = {high}, where entropy.control = {self.entropy.control}"
            )
        return self

    @model_validator(mode="after")
    def _cap_needs_recompute(self) -> Self:
        if self.tis_cap is not None and not self.recompute_old_logprobs:
            raise ValueError(
                f"tis_cap = {self.tis_cap} needs recompute_old_logprobs = true: without it pi_old "
                "is the generator's own record and there is no gap to correct"
            )
        return self

    def settings(self, num_minibatches: int) -> AlgorithmSettings:
        return AlgorithmSettings(
            num_minibatches=num_minibatches, **self.model_dump(exclude={"entropy"})
        )


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
    max_staleness: Count | None = None
    """Trainer steps between the weights that sampled a token and those it is trained on, at most;
    unset, the bound of n_async and queue_size holds on average. 0 is synchronous."""
    kv_budget_tokens: Positive | None = None
    """Of each generator's KV cache, tokens that the sequences in flight may count for: prompts, and
    what is generated or reserved. Further ones wait; unset, the server divides its cache alone."""
    kv_reserve: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of reward.l_max that a sequence counts for at the least; 1: it never needs more."""
    microbatch_tokens: Positive
    """Token budget of a microbatch, prompts included."""
    batch_timeout_s: PositiveFloat = 3600.0
    """Longest wait of a trainer for a batch."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig
    weight_bucket_mib: PositiveFloat = 512.0
    """Largest run of weights that is sent at once; a larger tensor is one by itself."""
    weight_plan: PlanKind = PlanKind.GATHER
    """`gather`: whole tensors to every generator rank, which SGLang's loader takes its part from.
    `direct`: to every rank its part alone, straight into the parameters."""
    keep_samples: Count = 4
    """Completions of each step written to samples.jsonl."""
    stages: tuple[RlStageConfig, ...] = ()
    """Those that follow the first, which the other keys describe."""

    @property
    def length(self) -> tuple[str, int]:
        """As that of SftConfig."""
        return "num_steps", self.num_steps

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


class CheckpointConfig(Section):
    """What is kept of the trainers' state, from which `magistral resume` goes on."""

    sft_every_steps: Count = 200
    """Steps of the SFT stage between two checkpoints; 0: only one at its end."""
    rl_every_steps: Count = 10
    """The same for the RL stage, whose steps take longer."""
    keep_last: Positive = 2
    """Newest checkpoints of a stage that are kept."""
    keep_every: Count = 0
    """Every so manieth checkpoint is kept for good; 0: none."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait of training for a checkpoint that is still being written."""
    grace_s: Annotated[float, Field(ge=0)] = 30.0
    """How long a run that is asked to end (Ctrl-C, SIGTERM) waits for the trainers to end their
    step and save; 0: not at all."""
