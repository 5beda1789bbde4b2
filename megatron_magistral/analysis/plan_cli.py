"""`magistral plan CONFIG`: what a run would be like, and how to divide GPUs, without any GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from megatron_magistral.analysis.outlook import Outlook
from megatron_magistral.analysis.pipeline_model import Mode
from megatron_magistral.analysis.plan_tables import (
    advice,
    describe,
    memory_table,
    modes_table,
    reason,
    split_table,
)
from megatron_magistral.analysis.site_options import (
    AssumeOption,
    FromRunOption,
    GpuOption,
    GpusPerNodeOption,
    LengthsOption,
    ModelOption,
    SiteError,
    architecture_for,
    parse_curve,
    site_for,
)
from megatron_magistral.analysis.split import Forecast, divide
from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError, load
from megatron_magistral.placement import PlacementError
from megatron_magistral.trainer.layout import LayoutError

BAD_INPUT = 2

PromptTokens = Annotated[float | None, typer.Option(help="Mean length of prompts in tokens.")]
VerifiersPerNode = Annotated[
    int | None, typer.Option(min=1, help="Completions that a node grades at once.")
]
TrainTokensPerS = Annotated[
    float | None, typer.Option(help="Measured, of all trainers together: tokens a second.")
]
UpdateS = Annotated[float | None, typer.Option(help="Measured: seconds of a weight update.")]
PauseS = Annotated[
    float | None, typer.Option(help="Of these, seconds for which generation is paused.")
]
DropShare = Annotated[
    float | None,
    typer.Option(min=0, max=0.99, help="Share of groups whose rewards are all equal."),
]
GeneratorSpeed = Annotated[
    str | None, typer.Option(help="Measured, of one generator: CONCURRENCY:TOKENS_PER_S,...")
]


class ConfigFirst(TyperGroup):
    """A group in which `plan CONFIG ...` means `plan run CONFIG ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def plan_run(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A file of configs/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=2, help="Try how to divide so many between trainers and generators."),
    ] = None,
    stage: Annotated[int, typer.Option(min=0, help="Stage of RL: 0, or of rl.stages 1 on.")] = 0,
    model: ModelOption = None,
    gpu: GpuOption = "h100",
    gpus_per_node: GpusPerNodeOption = 8,
    lengths: LengthsOption = None,
    from_run: FromRunOption = None,
    prompt_tokens: PromptTokens = None,
    drop_share: DropShare = None,
    verifiers_per_node: VerifiersPerNode = None,
    generator_speed: GeneratorSpeed = None,
    train_tokens_per_s: TrainTokensPerS = None,
    update_s: UpdateS = None,
    pause_s: PauseS = None,
    assume: AssumeOption = None,
    seed: Annotated[int, typer.Option(help="Of the simulated lengths.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write this file.")] = None,
) -> None:
    """Simulate a run: throughput, what stands idle, staleness, queue, cache, memory; compare with
    synchronous training; with --gpus, recommend how to divide them.

    Exit code 2, after the tables, if the model does not fit the GPUs."""
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        _refuse(f"--json {json_file}: no file can be made there")
    try:
        config = _at_stage(load(config_path, overrides or (), check_files=False), stage)
        site = site_for(
            config,
            gpu=gpu,
            gpus_per_node=gpus_per_node,
            lengths=lengths,
            from_run=from_run,
            assume=assume,
            same_layout=gpus is None,
            prompt_tokens=prompt_tokens,
            drop_share=drop_share,
            verifiers_per_node=verifiers_per_node,
            curve=parse_curve(generator_speed),
            train_tokens_per_s=train_tokens_per_s,
            update_s=update_s,
            pause_s=pause_s,
        )
        forecast = Forecast(config, architecture_for(config, model), site)
        candidates = _candidates(forecast, gpus, seed)
    except (ConfigError, SiteError, LayoutError, PlacementError) as error:
        _refuse(str(error))
    document = {"config": str(config_path), "seed": seed, **_report(forecast, candidates, seed)}
    _end(document, json_file)


def _end(document: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if document["plan"]["problems"]:
        raise typer.Exit(BAD_INPUT)


def _report(
    forecast: Forecast, candidates: list[tuple[Forecast, Outlook]], seed: int
) -> dict[str, Any]:
    """Show the best candidate, or the config as it is where none were asked for."""
    document: dict[str, Any] = {}
    if candidates:
        forecast, outlook = _best(candidates)
        title = f"{forecast.num_gpus} GPUs between trainers and generators"
        _console().print(split_table(candidates, forecast, title))
        _say(reason(forecast, outlook))
        document["candidates"] = [_row(*candidate) for candidate in candidates]
    return document | {"plan": _show(forecast, seed)}


def _at_stage(config: Config, stage: int) -> Config:
    if config.rl is None:
        raise ConfigError("rl = null: plans are of the RL stage, and this config has none")
    if stage >= config.num_rl_stages:
        raise ConfigError(f"--stage {stage}: the config has stages 0 to {config.num_rl_stages - 1}")
    return config.at_stage(stage)


def _candidates(forecast: Forecast, gpus: int | None, seed: int) -> list[tuple[Forecast, Outlook]]:
    if gpus is None:
        return []
    return [(each, each.outlook(seed=seed)) for each in divide(forecast, gpus)]


def _best(candidates: list[tuple[Forecast, Outlook]]) -> tuple[Forecast, Outlook]:
    return max(candidates, key=lambda c: (not c[0].problems(), c[1].steps_per_h))


def _show(forecast: Forecast, seed: int) -> dict[str, Any]:
    outlooks = {mode: forecast.outlook(mode, seed=seed) for mode in Mode}
    for line in describe(forecast):
        _say(line)
    _console().print(modes_table(forecast, outlooks))
    _console().print(memory_table(forecast))
    asynchronous = outlooks[Mode.ASYNCHRONOUS]
    for note in (*forecast.notes(), *advice(forecast, asynchronous)):
        _say(f"note: {note}", "yellow")
    for problem in forecast.problems():
        _say(f"does not fit: {problem}", "red")
    return _row(forecast, asynchronous) | {
        "modes": {mode.value: asdict(outlook) for mode, outlook in outlooks.items()}
    }


def _row(forecast: Forecast, outlook: Outlook) -> dict[str, Any]:
    return {
        "trainer_gpus": forecast.layout.world_size,
        "data": forecast.layout.dp,
        "num_replicas": forecast.config.generator.num_replicas,
        "train_s": forecast.train_s,
        "generate_s": forecast.generate_s,
        "trainer_memory_bytes": asdict(forecast.trainer_memory),
        "kv_capacity_tokens": forecast.kv_capacity,
        "problems": forecast.problems(),
        "outlook": asdict(outlook),
    }


def _console() -> Console:
    return Console(highlight=False)


def _say(text: str, style: str | None = None) -> None:
    _console().print(text, style=style, markup=False)


def _refuse(message: str) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)
