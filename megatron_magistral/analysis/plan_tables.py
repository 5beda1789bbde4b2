"""What `magistral plan` shows, within 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from megatron_magistral.analysis.hardware import GIB
from megatron_magistral.analysis.outlook import Outlook
from megatron_magistral.analysis.pipeline_model import Mode
from megatron_magistral.analysis.split import Forecast

# Idle for more than this share of the time is what a split is judged by.
MUCH = 0.05


def describe(forecast: Forecast) -> list[str]:
    """What the plan is of, and where its speeds come from."""
    config, site, rl = forecast.config, forecast.site, forecast.rl
    layout, generator = forecast.layout, config.generator
    curve_from = "measured" if site.curve is not None else f"model of an {site.gpu.name}"
    train_from = "measured" if site.train_tokens_per_s is not None else "model"
    most, speed = forecast.curve.points[-1]
    update_s, pause_s = forecast.update_times
    return [
        f"{config.run.name}: n_batch {rl.n_batch:,}, n_async {rl.n_async:,}, groups of "
        f"{rl.group_size}; {forecast.num_gpus} GPUs ({site.gpu.name})",
        f"lengths: {site.lengths.description}, mean {site.mean_length:,.0f}, at most "
        f"{site.lengths.cap:,.0f} tokens, prompts {site.prompt_tokens:,.0f}",
        f"trainers: {layout.world_size} GPUs, TP {layout.tp} x PP {layout.pp} x DP {layout.dp}"
        + (f", EP {layout.ep}" if layout.ep > 1 else "")
        + f"; {forecast.train_tokens_per_s:,.0f} tokens/s ({train_from})",
        f"generators: {generator.num_replicas} of {generator.tensor_parallel} GPUs; each "
        f"{forecast.curve.tokens_per_s(1):,.0f} tokens/s alone, {speed:,.0f} at {most:,.0f} at "
        f"once ({curve_from})",
        f"weight update: {update_s:.2f} s, of which generation pauses {pause_s:.2f} s",
    ]


def modes_table(forecast: Forecast, outlooks: Mapping[Mode, Outlook]) -> Table:
    table = Table("", title=f"{forecast.config.run.name}: what asynchrony gains")
    for mode in outlooks:
        table.add_column(mode.value, justify="right")
    slowest = outlooks[Mode.SYNCHRONOUS].steps_per_h
    verifiers = [o.verifier_idle for o in outlooks.values()]
    rows = {
        "steps/h": [f"{o.steps_per_h:.2f}" for o in outlooks.values()],
        "  x synchronous": [f"{o.steps_per_h / slowest:.2f}" for o in outlooks.values()],
        "trained tokens/s": [f"{o.trained_tokens_per_s:,.0f}" for o in outlooks.values()],
        "generators idle": [f"{o.generator_idle:.1%}" for o in outlooks.values()],
        "generators paused": [f"{o.generator_paused:.1%}" for o in outlooks.values()],
        "running at once": [f"{o.running:,.0f}" for o in outlooks.values()],
        "trainers idle": [f"{o.trainer_idle:.1%}" for o in outlooks.values()],
        "verifiers idle": ["-" if v is None else f"{v:.1%}" for v in verifiers],
        "token age, mean": [f"{o.staleness_mean:.2f}" for o in outlooks.values()],
        "token age, max": [str(o.staleness_max) for o in outlooks.values()],
        "queue, completions": [f"{o.queue:,.0f}" for o in outlooks.values()],
        "cache used, mean": [_share(o.kv_tokens, forecast) for o in outlooks.values()],
        "cache used, peak": [_share(o.kv_tokens_peak, forecast) for o in outlooks.values()],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _share(kv_tokens: float, forecast: Forecast) -> str:
    capacity = forecast.kv_capacity * forecast.config.generator.num_replicas
    return f"{kv_tokens / capacity:.0%}" if capacity else "none"


def memory_table(forecast: Forecast) -> Table:
    """GiB on the fullest GPU of each kind."""
    trainer, generator = forecast.trainer_memory, forecast.generator_memory
    cache = forecast.kv_capacity * generator.kv_token
    rows: dict[str, tuple[float | None, float | None]] = {
        "weights": (trainer.weights, generator.weights),
        "gradients, fp32": (trainer.gradients, None),
        "optimizer": (trainer.optimizer, None),
        "average of weights": (trainer.average or None, None),
        "activations": (trainer.activations, None),
        "vocabulary head": (trainer.head, None),
        f"cache of {forecast.kv_capacity:,} tokens": (None, cache),
        "total": (trainer.total, generator.weights + cache),
        "of": (forecast.trainer_limit, forecast.generator_limit),
    }
    table = Table("GiB on a GPU", title="Memory")
    table.add_column(f"trainer, stage {trainer.stage}", justify="right")
    table.add_column("generator", justify="right")
    for name, cells in rows.items():
        if cells != (None, None):
            table.add_row(name, *("" if cell is None else _gib(cell) for cell in cells))
    return table


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB / 10 else f"{num_bytes / GIB:.3f}"


def split_table(
    candidates: Sequence[tuple[Forecast, Outlook]], best: Forecast, title: str
) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("train", "DP", "generate", "steps/h", "gen idle", "train idle", "age"):
        table.add_column(name, justify="right")
    table.add_column("limited by", no_wrap=True)
    for forecast, outlook in candidates:
        generator = forecast.config.generator
        problems = forecast.problems()
        table.add_row(
            "*" if forecast is best else "",
            str(forecast.layout.world_size),
            str(forecast.layout.dp),
            f"{generator.num_replicas} x {generator.tensor_parallel}",
            f"{outlook.steps_per_h:.2f}",
            f"{outlook.generator_idle:.0%}",
            f"{outlook.trainer_idle:.0%}",
            f"{outlook.staleness_mean:.1f}",
            "memory" if problems else limited_by(forecast, outlook),
            style="bold" if forecast is best else ("dim" if problems else None),
        )
    return table


def limited_by(forecast: Forecast, outlook: Outlook) -> str:
    """What would have to be faster, or larger, for more steps."""
    if outlook.verifier_idle is not None and outlook.verifier_idle < MUCH:
        return "verifiers"
    if outlook.trainer_idle < MUCH:
        return "trainers" if outlook.generator_idle > MUCH else "both"
    return "queue" if forecast.is_held_back(outlook) else "generators"


def reason(best: Forecast, outlook: Outlook) -> str:
    generator = best.config.generator
    return (
        f"recommended: parallel.data={best.layout.dp} "
        f"generator.num_replicas={generator.num_replicas}, {outlook.steps_per_h:.2f} steps/h, "
        f"limited by {limited_by(best, outlook)}: a step trains {best.train_s:.0f} s, and its "
        f"completions would take generators that are kept full {best.generate_s:.0f} s"
    )


def advice(forecast: Forecast, outlook: Outlook) -> list[str]:
    """What to change for more steps, where the simulation shows it."""
    if not forecast.is_held_back(outlook):
        return []
    return [
        f"{outlook.running:,.0f} completions run at once though "
        f"{forecast.most_at_once:,} could: groups whose slowest completion is under way fill "
        f"the bound of n_async + queue_size = {forecast.rl.n_async + forecast.rl.queue_capacity:,}"
        "; a larger rl.queue_size keeps generators fuller, and tokens get older"
    ]
