"""`magistral plan weights`: how long an update would take in layouts that are not at hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_magistral.analysis.memory import Training, generator_memory, trainer_memory
from megatron_magistral.output_file import check_output_file
from megatron_magistral.trainer.layout import LayoutError
from megatron_magistral.weights.architecture import Architecture, ArchitectureError
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import direct_plan, gather_plan
from megatron_magistral.weights.plan_cost import Links, Prediction, Senders, predict
from megatron_magistral.weights.presets import find_model, num_parameters
from megatron_magistral.weights.settings import PlanKind

BAD_INPUT = 2
TARGET_S = 5.0  # arXiv 2506.10910, section 3
GIB, MIB = 1 << 30, 1 << 20
LINK_HELP = "A property of the cluster, as NAME=VALUE; repeat. Names and defaults: " + ", ".join(
    f"{field.name}={field.default:g}" for field in fields(Links)
)

DEFAULT_GPUS = [64, 256, 1024, 4096]

Model = Annotated[str, typer.Option(help="A preset, a config.json, or about how many MiB.")]
Gpus = Annotated[list[int], typer.Option(help="Of trainer and generators together; repeat.")]
GeneratorEp = Annotated[
    int, typer.Option(min=1, help="Ranks of a generator that share its experts.")
]
TrainerShare = Annotated[float, typer.Option(help="Of the GPUs, for the trainer: between 0 and 1.")]
GpuMemoryGib = Annotated[float, typer.Option(min=1, help="GiB, to warn of what cannot fit.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the numbers to this file.")
]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def plan() -> None:
    """What would happen, without doing it."""


@dataclass(frozen=True)
class Layouts:
    """How a user divides `gpus` between trainer and generators, and each side."""

    tp: int
    pp: int
    ep: int
    generator_tp: int
    generator_ep: int
    trainer_share: float

    def on(self, gpus: int) -> tuple[TrainerLayout, GeneratorLayout]:
        """Raises LayoutError if the GPUs cannot be divided so."""
        trainer_gpus = round(gpus * self.trainer_share)
        generator_gpus = gpus - trainer_gpus
        for what, num, size, key in (
            ("trainer", trainer_gpus, self.tp * self.pp, "tp x pp"),
            ("generator", generator_gpus, self.generator_tp, "generator-tp"),
        ):
            if num < size or num % size:
                raise LayoutError(f"{num} {what} GPUs must be a multiple of {key} = {size}")
        return (
            TrainerLayout(
                tp=self.tp, pp=self.pp, dp=trainer_gpus // (self.tp * self.pp), ep=self.ep
            ),
            GeneratorLayout(
                replicas=generator_gpus // self.generator_tp,
                tp=self.generator_tp,
                ep=self.generator_ep,
            ),
        )


@app.command("weights")
def weights(
    model: Model = "magistral-small-24b",
    gpus: Gpus = DEFAULT_GPUS,
    tp: Annotated[int, typer.Option(min=1, help="Trainer's tensor parallel size.")] = 8,
    pp: Annotated[int, typer.Option(min=1, help="Trainer's pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Trainer's expert parallel size.")] = 1,
    generator_tp: Annotated[int, typer.Option(min=1, help="Ranks of a generator.")] = 8,
    generator_ep: GeneratorEp = 1,
    trainer_share: TrainerShare = 0.5,
    bucket_mib: Annotated[int, typer.Option(min=1, help="Largest bucket, MiB.")] = 512,
    wire_bytes: Annotated[int, typer.Option(min=1, help="Bytes of an element on the wire.")] = 2,
    gpu_memory_gib: GpuMemoryGib = 80.0,
    link: Annotated[list[str] | None, typer.Option(help=LINK_HELP)] = None,
    json_file: JsonFile = None,
) -> None:
    """Predict the time, the pause and the memory of a weight update, by each plan."""
    layouts = Layouts(tp, pp, ep, generator_tp, generator_ep, trainer_share)
    try:
        _check(trainer_share, json_file)
        arch, links = find_model(model), _links(link or [])
    except (ArchitectureError, ValueError) as error:
        _refuse(str(error))
    console, tables = Console(), _tables()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for num_gpus in gpus:
        try:
            trainer, generator = layouts.on(num_gpus)
            gather, direct = (
                make(arch, trainer, generator, bucket_bytes=bucket_mib * MIB, itemsize=wire_bytes)
                for make in (gather_plan, direct_plan)
            )
        except LayoutError as error:
            problems.append(f"--gpus {num_gpus}: {error}")
            continue
        problems += [
            f"--gpus {num_gpus}: {what} are {held_gib:.0f} GiB a GPU, more than {gpu_memory_gib:g}"
            for what, held_gib in _held_gib(arch, trainer, generator, wire_bytes).items()
            if held_gib > gpu_memory_gib
        ]
        for prediction in (
            predict(gather, links),
            predict(gather, links, PlanKind.DIRECT),
            predict(direct, links),
        ):
            for table, cells in zip(tables, _cells(prediction), strict=True):
                table.add_row(str(num_gpus), _label(prediction), *cells)
            rows.append({"gpus": num_gpus, **asdict(prediction)})
    if rows:
        console.print(_headline(model, arch, wire_bytes), highlight=False, soft_wrap=True)
        console.print(*tables)
        console.print("direct*: if every rank that holds a part sent it, which is not built")
    for problem in problems:
        console.print(problem, style="yellow", highlight=False, soft_wrap=True)
    if json_file is not None:
        setting = {"model": model, "links": asdict(links), "layout": asdict(layouts)}
        json_file.write_text(json.dumps({**setting, "predictions": rows}, indent=2) + "\n")
    if not rows:
        raise typer.Exit(BAD_INPUT)


def _check(trainer_share: float, json_file: Path | None) -> None:
    """Raises ValueError for what can be refused before any work."""
    if not 0 < trainer_share < 1:
        raise ValueError(f"--trainer-share {trainer_share}: must be between 0 and 1")
    check_output_file("--json", json_file)


def _links(settings: list[str]) -> Links:
    """Raises ValueError for what is no NAME=VALUE, with the names that there are."""
    types = {
        field.name: int if isinstance(field.default, int) else float for field in fields(Links)
    }
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if name not in types or not equals:
            raise ValueError(
                f"--link {setting}: must be NAME=VALUE, NAME one of {', '.join(types)}"
            )
        try:
            values[name] = types[name](text)
        except ValueError:
            raise ValueError(f"--link {setting}: {text!r} is not a number") from None
        if not 0 <= values[name] < math.inf or (values[name] == 0 and name != "nvlink_gb_s"):
            raise ValueError(f"--link {setting}: must be more than 0")
    return Links(**values)


def _held_gib(
    arch: Architecture, trainer: TrainerLayout, generator: GeneratorLayout, wire_bytes: int
) -> dict[str, float]:
    """GiB that a GPU must hold whatever else it does: without activations, logits and cache."""
    stages = trainer_memory(arch, trainer, Training(microbatch_tokens=1, num_microbatches=1))
    held = max(stage.weights + stage.gradients + stage.optimizer for stage in stages)
    shape = replace(generator, replicas=1)
    return {
        "a trainer's weights, gradients and optimizer": held / GIB,
        "a generator's weights": generator_memory(arch, shape, wire_bytes).weights / GIB,
    }


def _headline(model: str, arch: Architecture, wire_bytes: int) -> str:
    parameters = num_parameters(arch)
    return (
        f"{model}: {parameters / 1e9:.1f}e9 parameters, {parameters * wire_bytes / GIB:.1f} GiB on "
        f"the wire; target {TARGET_S:g} s"
    )


def _tables() -> tuple[Table, Table]:
    """The whole update, and its parts: two tables that each fit into 80 columns."""
    whole = ("update", "pause", "buckets", "sent", "received", "memory")
    parts = ("1st bucket", "gather", "convert", "calls", "wire", "load")
    tables = (
        Table(
            title="The update: seconds, and GiB of the busiest rank",
            box=SIMPLE_HEAD,
            pad_edge=False,
        ),
        Table(
            title="Its parts in seconds, of which most are hidden", box=SIMPLE_HEAD, pad_edge=False
        ),
    )
    for table, columns in zip(tables, (whole, parts), strict=True):
        table.add_column("GPUs", justify="right", no_wrap=True)
        table.add_column("plan", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
    return tables


def _label(p: Prediction) -> str:
    return p.kind.value + ("*" if p.senders is Senders.HOLDERS else "")


def _cells(p: Prediction) -> tuple[list[str], list[str]]:
    """A row of each table, but for what names it."""
    style = "green" if p.total_s <= TARGET_S else "red"
    extra = max(p.trainer_extra_bytes, p.generator_extra_bytes)
    whole = [
        f"[{style}]{p.total_s:.2f}[/]",
        f"{p.pause_s:.2f}",
        str(p.num_buckets),
        *(f"{value / GIB:.1f}" for value in (p.sent_bytes, p.received_bytes, extra)),
    ]
    parts = (p.first_bucket_s, p.gather_s, p.convert_s, p.call_s, p.wire_s, p.load_s)
    return whole, [f"{value:.2f}" for value in parts]


def _refuse(message: str) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(BAD_INPUT)
