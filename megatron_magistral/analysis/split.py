"""What a run would be like on GPUs that are not at hand, and how to divide them. Pure.

A `Forecast` is a config on a `Site`: the speeds that follow, memory, and a simulated run. To divide
a number of GPUs, every number of data-parallel replicas that fits is judged by the slower of
training and generation, and the best of them are simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import fmean

from megatron_magistral.analysis.hardware import GIB, Assumptions, Gpu
from megatron_magistral.analysis.lengths import Lengths
from megatron_magistral.analysis.memory import (
    GeneratorMemory,
    TrainerMemory,
    Training,
    generator_memory,
    trainer_memory,
)
from megatron_magistral.analysis.outlook import Outlook, outlook
from megatron_magistral.analysis.pipeline_model import Handover, Mode, Settings, Speeds, in_mode
from megatron_magistral.analysis.roofline import (
    decode_curve,
    microbatches,
    start_s,
    train_flops_per_token,
    train_tokens_per_s,
)
from megatron_magistral.analysis.simulate import simulate
from megatron_magistral.analysis.speeds import SpeedCurve, mean_context, sequence_rates
from megatron_magistral.config import Config, DType
from megatron_magistral.config_stages import RlConfig
from megatron_magistral.placement import PlacementError, place_roles
from megatron_magistral.trainer.layout import LayoutError, ParallelLayout, check_layout
from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import Plan, gather_plan
from megatron_magistral.weights.plan_cost import Links, predict

MIB = 1 << 20
ITEMSIZE = {DType.BFLOAT16: 2, DType.FLOAT32: 4}
NUM_WARM_UP = 4
# Completions of a simulated run: enough for a per cent, few enough for a second.
NUM_SIMULATED = 40_000
MIN_STEPS, MAX_STEPS = 12, 120
# Generators that run less than this share of what they could are held back.
HELD_BACK = 0.9


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a config does not say: the machines, the lengths, and speeds where they are known.

    Measured speeds replace the model's: `curve` and `start_s` of one generator,
    `train_tokens_per_s` of all trainers, `update_s` and `pause_s` of a weight update.
    """

    gpu: Gpu
    lengths: Lengths
    gpus_per_node: int = 8
    prompt_tokens: float = 512.0
    drop_share: float = 0.0
    verifiers_per_node: int = 64
    assumed: Assumptions = field(default_factory=Assumptions)
    links: Links = field(default_factory=Links)
    curve: SpeedCurve | None = None
    start_s: float | None = None
    train_tokens_per_s: float | None = None
    update_s: float | None = None
    pause_s: float | None = None
    fused: bool = True

    @cached_property
    def draws(self) -> list[float]:
        return self.lengths.draws()

    @property
    def mean_length(self) -> float:
        return fmean(self.draws)

    @property
    def mean_context(self) -> float:
        return mean_context(self.draws, self.prompt_tokens)


@dataclass(frozen=True)
class Forecast:
    """A config on a site. Raises LayoutError if the model does not fit the layout."""

    config: Config
    arch: Architecture
    site: Site

    def __post_init__(self) -> None:
        check_layout(self.arch, self.layout)
        check_layout(self.arch, ParallelLayout(self.config.generator.tensor_parallel))

    @property
    def rl(self) -> RlConfig:
        assert self.config.rl is not None, "plans are of the RL stage"
        return self.config.rl

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.of(self.config.parallel)

    @property
    def num_gpus(self) -> int:
        generator = self.config.generator
        return self.layout.world_size + generator.num_replicas * generator.tensor_parallel

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.num_gpus / self.site.gpus_per_node)

    @property
    def tokens_per_step(self) -> float:
        """Prompts included."""
        return self.rl.n_batch * (self.site.mean_length + self.site.prompt_tokens)

    # --- memory ---------------------------------------------------------------------------------

    @cached_property
    def trainer_memory(self) -> TrainerMemory:
        """Of the stage that needs most."""
        training = Training(
            microbatch_tokens=self.rl.microbatch_tokens,
            num_microbatches=self.num_microbatches,
            itemsize=ITEMSIZE[self.config.model.dtype],
            recompute=self.config.parallel.recompute,
            has_average=self.rl.algorithm.kl_coef > 0,
            fused=self.site.fused,
        )
        stages = trainer_memory(self.arch, self.layout, training)
        return max(stages, key=lambda stage: stage.total)

    @cached_property
    def generator_memory(self) -> GeneratorMemory:
        layout = GeneratorLayout(tp=self.config.generator.tensor_parallel)
        return generator_memory(self.arch, layout, ITEMSIZE[self.config.generator.dtype])

    @property
    def trainer_limit(self) -> float:
        """Bytes that a trainer's GPU has for what is counted."""
        return self.site.gpu.memory_gib * GIB - self.site.assumed.trainer_reserve_bytes

    @property
    def generator_limit(self) -> float:
        return self.site.gpu.memory_gib * GIB * self.site.assumed.generator_share

    @property
    def kv_capacity(self) -> int:
        """Tokens that the cache of one generator holds."""
        room = self.generator_memory.kv_tokens(self.generator_limit)
        return min(room, self.config.generator.max_total_tokens or room)

    @property
    def max_running(self) -> int:
        """Completions at once on one generator, as its cache fills on average, and as its KV budget
        admits them."""
        most = self.kv_capacity / self.site.mean_context
        if (budget_tokens := self.rl.kv_budget_tokens) is not None:
            reserved = self.site.prompt_tokens + self.rl.kv_reserve * self.config.reward.l_max
            most = min(most, budget_tokens / max(reserved, self.site.mean_context))
        return max(1, math.floor(most))

    # --- speeds ---------------------------------------------------------------------------------

    @property
    def num_microbatches(self) -> int:
        return microbatches(
            self.tokens_per_step / self.rl.num_minibatches,
            self.layout.dp,
            self.rl.microbatch_tokens,
        )

    @cached_property
    def curve(self) -> SpeedCurve:
        if self.site.curve is not None:
            return self.site.curve
        return decode_curve(
            self.arch,
            self.config.generator.tensor_parallel,
            self.generator_memory,
            self.site.mean_context,
            min(self.max_running, self.rl.n_async),
            self.site.gpu,
            self.site.assumed,
        )

    @cached_property
    def train_tokens_per_s(self) -> float:
        if self.site.train_tokens_per_s is not None:
            return self.site.train_tokens_per_s
        flops = train_flops_per_token(
            self.arch,
            self.site.draws,
            self.site.prompt_tokens,
            self.config.parallel.recompute,
        )
        return train_tokens_per_s(
            flops, self.layout, self.num_microbatches, self.site.gpu, self.site.assumed
        )

    @cached_property
    def update_times(self) -> tuple[float, float]:
        """(whole, pause) of a weight update, seconds."""
        if self.site.update_s is not None:
            pause_s = self.site.update_s if self.site.pause_s is None else self.site.pause_s
            return self.site.update_s, min(pause_s, self.site.update_s)
        layout, generator = self.layout, self.config.generator
        trainer = TrainerLayout(
            tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep, vpp=layout.vpp
        )
        receivers = GeneratorLayout(replicas=generator.num_replicas, tp=generator.tensor_parallel)
        # Who takes part changes the cost of the buckets alone, not what is in them.
        plan = _update_plan(
            self.arch,
            replace(trainer, dp=trainer.ep),
            GeneratorLayout(tp=generator.tensor_parallel),
            int(self.rl.weight_bucket_mib * MIB),
            ITEMSIZE[generator.dtype],
        )
        plan = replace(plan, trainer=trainer, generator=receivers)
        cost = predict(plan, self.site.links, self.rl.weight_plan)
        return cost.total_s, cost.pause_s

    @property
    def speeds(self) -> Speeds:
        replicas = self.config.generator.num_replicas
        update_s, pause_s = self.update_times
        assumed = self.site.assumed
        prompt_s = self.site.start_s
        if prompt_s is None:
            tp = self.config.generator.tensor_parallel
            prompt_s = start_s(self.arch, tp, self.site.prompt_tokens, self.site.gpu, assumed)
        beside_s = assumed.beside_update_s if self.site.update_s is None else 0.0
        return Speeds(
            rates=sequence_rates(self.curve, replicas, self.max_running, self.most_in_flight),
            start_s=prompt_s / replicas,
            train_s=beside_s,
            train_tokens_per_s=self.train_tokens_per_s,
            update_s=update_s,
            pause_s=pause_s,
            verify_s=assumed.verify_s,
            num_verifiers=self.site.verifiers_per_node * self.num_nodes,
            prompt_tokens=self.site.prompt_tokens,
        )

    @property
    def most_in_flight(self) -> int:
        return max(self.rl.n_async, self.rl.n_batch)

    @property
    def train_s(self) -> float:
        """Of a step, the weight update included."""
        speeds = self.speeds
        trains_s = speeds.train_s + self.tokens_per_step / speeds.train_tokens_per_s
        return trains_s + speeds.update_s

    @property
    def generate_s(self) -> float:
        """Of a step's completions, those of dropped groups too, with generators kept full."""
        rates = self.speeds.rates
        assert rates is not None
        running = min(self.rl.n_async, len(rates) - 1)
        needed = self.rl.n_batch / (1 - self.site.drop_share)
        prompts_s = needed * self.speeds.start_s
        return needed * self.site.mean_length / (running * rates[running]) + prompts_s

    # --- the run --------------------------------------------------------------------------------

    def outlook(self, mode: Mode = Mode.ASYNCHRONOUS, *, seed: int = 0) -> Outlook:
        """Of a simulated run."""
        size = self.rl.group_size
        n_async = self.rl.n_async // size * size  # only whole groups are admitted
        settings = Settings(
            n_async=n_async,
            n_batch=self.rl.n_batch,
            queue_capacity=(self.rl.n_async + self.rl.queue_capacity) // size * size - n_async,
            group_size=size,
            handover=Handover.KEEP if self.rl.max_staleness is None else Handover.BOUNDED,
            max_staleness=self.rl.max_staleness or 0,
            drop_share=self.site.drop_share,
        )
        num_steps = min(MAX_STEPS, max(MIN_STEPS, NUM_SIMULATED // self.rl.n_batch))
        speeds = self.speeds
        trace = simulate(
            in_mode(settings, mode),
            self.site.lengths.sample,
            speeds,
            num_steps=num_steps + NUM_WARM_UP,
            seed=seed,
        )
        return outlook(trace, speeds, num_warm_up=NUM_WARM_UP)

    @property
    def most_at_once(self) -> int:
        """Completions that could run, were nothing held back."""
        return min(self.rl.n_async, self.max_running * self.config.generator.num_replicas)

    def is_held_back(self, outlook: Outlook) -> bool:
        """Whether admission waits although the trainer has time and generators have room."""
        held_back = outlook.running < HELD_BACK * self.most_at_once
        return held_back and outlook.trainer_idle > 1 - HELD_BACK

    def problems(self) -> list[str]:
        """What would make the run fail or crawl, however it is scheduled."""
        found = []
        needed, limit = self.trainer_memory.total, self.trainer_limit
        if needed > limit:
            found.append(
                f"a trainer's GPU needs {needed / GIB:.1f} GiB of {limit / GIB:.1f}: raise "
                "parallel.tensor, pipeline or data, set parallel.recompute, or lower "
                "rl.microbatch_tokens"
            )
        weights, limit = self.generator_memory.weights, self.generator_limit
        longest = self.config.reward.l_max + self.site.prompt_tokens
        if weights >= limit:
            found.append(
                f"a generator's GPU needs {weights / GIB:.1f} GiB for weights of "
                f"{limit / GIB:.1f}: raise generator.tensor_parallel"
            )
        elif self.kv_capacity < longest:
            found.append(
                f"a generator's cache holds {self.kv_capacity:,} tokens, one completion may have "
                f"{longest:,.0f}: raise generator.tensor_parallel"
            )
        return found

    def notes(self) -> list[str]:
        """What is allowed and costs speed."""
        found = []
        places = self.max_running * self.config.generator.num_replicas
        if places < self.rl.n_async:
            found.append(
                f"the caches hold about {places:,} completions at once, rl.n_async = "
                f"{self.rl.n_async:,}: the others wait in their generator"
            )
        return found


@cache
def _update_plan(
    arch: Architecture,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
    bucket_bytes: int,
    itemsize: int,
) -> Plan:
    return gather_plan(arch, trainer, generator, bucket_bytes=bucket_bytes, itemsize=itemsize)


def divide(forecast: Forecast, num_gpus: int, *, most: int = 8) -> list[Forecast]:
    """The most promising ways to give `num_gpus` to trainers and generators, those with the fewest
    trainers first. Tensor and pipeline parallelism stay as they are.

    Raises PlacementError if there is none.
    """
    found, refused = [], ""
    parallel, generator = forecast.config.parallel, forecast.config.generator
    unit = parallel.tensor * parallel.pipeline
    nodes, rest = divmod(num_gpus, forecast.site.gpus_per_node)
    if rest and nodes:
        raise PlacementError(
            f"{num_gpus} GPUs: must be whole nodes of {forecast.site.gpus_per_node} GPUs"
        )
    per_node = forecast.site.gpus_per_node if nodes else num_gpus
    for data in range(1, num_gpus // unit + 1):
        replicas = (num_gpus - unit * data) // generator.tensor_parallel
        if replicas < 1 or forecast.rl.n_minibatch % data or unit * data % parallel.expert:
            continue
        config = with_split(forecast.config, data, replicas)
        try:
            place_roles(config, max(1, nodes), per_node)
            found.append(Forecast(config, forecast.arch, forecast.site))
        except (PlacementError, LayoutError) as error:
            refused = str(error)
    if not found:
        raise PlacementError(f"{num_gpus} GPUs cannot be divided: {refused or 'too few'}")
    # One that does not fit counts last, however fast it would be.
    found.sort(key=lambda f: (bool(f.problems()), max(f.train_s, f.generate_s)))
    return sorted(found[:most], key=lambda f: f.config.parallel.data)


def with_split(config: Config, data: int, replicas: int) -> Config:
    parallel = config.parallel.model_copy(update={"data": data})
    generator = config.generator.model_copy(update={"num_replicas": replicas})
    return config.model_copy(update={"parallel": parallel, "generator": generator})
