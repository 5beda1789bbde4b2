"""`magistral train CONFIG --dry-run --nodes N`: what a job on N nodes would be, and what is wrong.

Says where every role goes, what each GPU holds, how many tokens a step trains and how long it is
expected to take. Needs neither the nodes nor the model's weights, so that a job can be put right
before it is queued.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Console, RenderableType

from megatron_magistral.analysis.hardware import GIB
from megatron_magistral.analysis.lengths import Lengths
from megatron_magistral.analysis.memory import Training, generator_memory, trainer_memory
from megatron_magistral.analysis.outlook import Outlook
from megatron_magistral.analysis.plan_tables import advice, limited_by, memory_table
from megatron_magistral.analysis.roofline import (
    microbatches,
    train_flops_per_token,
    train_tokens_per_s,
)
from megatron_magistral.analysis.split import ITEMSIZE, Forecast, Site
from megatron_magistral.config import Config
from megatron_magistral.config_file import DATA_FILES
from megatron_magistral.placement import Placement, PlacementError, place_roles
from megatron_magistral.trainer.layout import LayoutError, ParallelLayout, check_layout
from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.placement import GeneratorLayout
from megatron_magistral.weights.presets import num_parameters

WIDTH = 78  # with "# " before it


@dataclass(frozen=True)
class DryRun:
    """Lines for people; with any `problems` the job would fail or crawl."""

    lines: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def dry_run(config: Config, arch: Architecture, site: Site, nodes: int) -> DryRun:
    """Pure but for asking whether the files of the config are on this machine."""
    lines = [f"model: {num_parameters(arch):.3g} parameters"]
    notes, problems = _missing_files(config), []
    try:
        placement = place_roles(config, nodes, site.gpus_per_node)
        lines += placement_lines(placement, site.gpu.name)
        if placement.num_idle_gpus:
            notes.append(f"{placement.num_idle_gpus} GPUs would stand idle")
    except PlacementError as error:
        problems.append(str(error))
    try:
        check_layout(arch, ParallelLayout.of(config.parallel))
    except LayoutError as error:
        return _result(lines, notes, [*problems, f"parallel: {error}"])
    if config.sft is not None:
        more, wrong = _sft(config, arch, site)
        lines += more
        problems += wrong
    for index in range(config.num_rl_stages):
        stage = config.at_stage(index)
        try:
            forecast = Forecast(stage, arch, _with_longest(site, stage))
        except LayoutError as error:
            problems.append(f"generator.tensor_parallel: {error}")
            break
        if index == 0:
            lines += _rendered(memory_table(forecast))
        outlook = forecast.outlook()
        lines += _rl_stage(forecast, outlook, index, config.num_rl_stages)
        name = f"rl stage {index}: " if config.num_rl_stages > 1 else ""
        notes += [name + note for note in (*forecast.notes(), *advice(forecast, outlook))]
        wrong = [*forecast.problems(), *_cache_problems(stage, forecast.kv_capacity)]
        problems += [problem for problem in wrong if problem not in problems]
    return _result(lines, notes, problems)


def _result(lines: list[str], notes: list[str], problems: list[str]) -> DryRun:
    wrapped = [
        part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ")
    ]
    return DryRun(tuple(wrapped), tuple(notes), tuple(problems))


def placement_lines(placement: Placement, gpu: str) -> list[str]:
    """Neighbouring nodes of one kind on one line."""
    used = placement.nodes * placement.gpus_per_node - placement.num_idle_gpus
    lines = [f"nodes: {placement.nodes} of {placement.gpus_per_node} {gpu} GPUs, {used} in use"]
    for _, group in groupby(range(placement.nodes), lambda node: _kind(placement, node)):
        first, *others = group
        last = others[-1] if others else first
        lines.append(
            f"  {_range('node', first, last)}: {', '.join(_roles(placement, first, last))}"
        )
    return lines


def _kind(placement: Placement, node: int) -> tuple[bool, int, int]:
    ranks, replicas = placement.trainer_ranks(node), placement.generators_on(node)
    return (node == placement.controller_node, len(ranks), len(replicas))


def _roles(placement: Placement, first: int, last: int) -> Iterator[str]:
    if first == placement.controller_node and placement.generators:
        yield "controller"
    if first in placement.verifier_nodes:
        yield "verifier"
    if ranks := placement.trainer_ranks(first):
        yield _range("trainer rank", ranks[0], placement.trainer_ranks(last)[-1])
    if replicas := placement.generators_on(first):
        number = placement.generators_on(last)[-1].index
        size = len(replicas[0].gpus)
        each = "" if size == 1 else f" ({size} GPUs each)"
        yield _range("generator", replicas[0].index, number) + each


def _range(name: str, first: int, last: int) -> str:
    return f"{name} {first}" if first == last else f"{name}s {first}-{last}"


def _sft(config: Config, arch: Architecture, site: Site) -> tuple[list[str], list[str]]:
    """Lines and problems. Of traces nothing is known but what is assumed of completions."""
    assert config.sft is not None
    sft, layout = config.sft, ParallelLayout.of(config.parallel)
    training = Training(
        microbatch_tokens=sft.microbatch_tokens,
        num_microbatches=sft.batch_size,
        itemsize=ITEMSIZE[config.model.dtype],
        recompute=config.parallel.recompute,
        fused=site.fused,
    )
    needed = max(stage.total for stage in trainer_memory(arch, layout, training)) / GIB
    room = site.gpu.memory_gib - site.assumed.trainer_reserve_gib
    tokens = sft.batch_size * (site.mean_length + site.prompt_tokens)
    num_microbatches = microbatches(tokens, layout.dp, sft.microbatch_tokens)
    recompute = config.parallel.recompute
    flops = train_flops_per_token(arch, site.draws, site.prompt_tokens, recompute)
    speed = train_tokens_per_s(flops, layout, num_microbatches, site.gpu, site.assumed)
    lines = [
        f"sft: {sft.batch_size:,} sequences a step of {site.lengths.description} tokens",
        f"  tokens a step: {tokens:,.0f} with prompts, in {num_microbatches * layout.dp:,} "
        f"microbatches of at most {sft.microbatch_tokens:,}",
        f"  step: {tokens / speed:,.0f} s expected; a trainer's GPU needs {needed:.1f} GiB of "
        f"{room:.1f}",
    ]
    problems = _selection_problems(config, arch, site) if config.selects else []
    if needed > room:
        problems.append(
            f"sft: a trainer's GPU needs {needed:.1f} GiB of {room:.1f}: raise parallel.tensor, "
            "pipeline or data, set parallel.recompute, or lower sft.microbatch_tokens"
        )
    return lines, problems


def _selection_problems(config: Config, arch: Architecture, site: Site) -> list[str]:
    """Of the generators that measure the candidates of SFT."""
    tp = config.generator.tensor_parallel
    try:
        check_layout(arch, ParallelLayout(tp))
    except LayoutError as error:
        return [f"generator.tensor_parallel: {error}"]
    itemsize = ITEMSIZE[config.generator.dtype]
    memory = generator_memory(arch, GeneratorLayout(tp=tp), itemsize)
    cache = memory.kv_tokens(site.gpu.memory_gib * GIB * site.assumed.generator_share)
    longest = config.reward.l_max + site.prompt_tokens
    if cache >= longest:
        return []
    return [
        f"selection: a generator's cache holds {cache:,} tokens beside its weights, one completion "
        f"may have {longest:,.0f}: raise generator.tensor_parallel"
    ]


def _rl_stage(forecast: Forecast, outlook: Outlook, index: int, num_stages: int) -> list[str]:
    rl, site = forecast.rl, forecast.site
    name = "rl" if num_stages == 1 else f"rl stage {index}"
    return [
        f"{name}: {rl.n_batch:,} completions a step of {site.lengths.description} tokens, at most "
        f"{forecast.config.reward.l_max:,}",
        f"  tokens a step: {forecast.tokens_per_step:,.0f} with prompts, in "
        f"{forecast.num_microbatches * forecast.layout.dp:,} microbatches of at most "
        f"{rl.microbatch_tokens:,}",
        f"  step: {outlook.step_s:,.0f} s expected, of which training and new weights "
        f"{forecast.train_s:,.0f} s; full generators take {forecast.generate_s:,.0f} s; limited by "
        f"{limited_by(forecast, outlook)}",
        f"  idle: generators {outlook.generator_idle:.0%}, trainers {outlook.trainer_idle:.0%}; "
        f"tokens are {outlook.staleness_mean:.1f} versions old on average, at most "
        f"{outlook.staleness_max}",
    ]


def _cache_problems(stage: Config, capacity_tokens: int) -> list[str]:
    assert stage.rl is not None
    budget_tokens = stage.rl.kv_budget_tokens
    if budget_tokens is None or budget_tokens <= capacity_tokens:
        return []
    return [
        f"rl.kv_budget_tokens = {budget_tokens}: a generator's KV cache is expected to hold "
        f"{capacity_tokens}; lower it, or raise generator.tensor_parallel"
    ]


def _with_longest(site: Site, stage: Config) -> Site:
    """The same lengths, cut where this stage cuts them."""
    cap = float(stage.reward.l_max)
    sample = site.lengths.sample
    lengths = Lengths(site.lengths.description, lambda rng: min(sample(rng), cap), cap)
    return replace(site, lengths=lengths)


def _missing_files(config: Config) -> list[str]:
    paths = {f"data.{key}": getattr(config.data, key) for key in DATA_FILES}
    paths["model.path"] = config.model.path
    return [
        f"{key} = {path}: not on this machine"
        for key, path in paths.items()
        if path is not None and not path.exists()
    ]


def _rendered(renderable: RenderableType) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=WIDTH, highlight=False).print(renderable)
    return [line.rstrip() for line in text.getvalue().splitlines()]
