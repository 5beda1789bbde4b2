"""The options of `magistral plan` and of `--dry-run` that say what a config does not."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from megatron_magistral.analysis.hardware import GPUS, Assumptions
from megatron_magistral.analysis.lengths import (
    FORMS,
    Lengths,
    LengthsError,
    lengths_of_run,
    parse_lengths,
)
from megatron_magistral.analysis.speeds import SpeedCurve
from megatron_magistral.analysis.split import Site
from megatron_magistral.config import Config, ModelShape
from megatron_magistral.jsonl import read_rows
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.weights.architecture import (
    Architecture,
    ArchitectureError,
    Family,
    read_config,
)
from megatron_magistral.weights.presets import PRESETS, find_model

# Of reward.l_max, where nothing is known: the mean of long reasoning before most of it is learnt.
ASSUMED_MEAN_SHARE = 0.25
ASSUMED_SIGMA = 0.8
ASSUMED_PROMPT_TOKENS = 512.0

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help=f"Reckon with this shape, not the config's: {', '.join(PRESETS)} or a config.json.",
    ),
]
GpuOption = Annotated[str, typer.Option("--gpu", help=f"One of {', '.join(GPUS)}.")]
GpusPerNodeOption = Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of a node.")]
LengthsOption = Annotated[
    str | None, typer.Option("--lengths", help=f"Lengths of completions in tokens: {FORMS}.")
]
FromRunOption = Annotated[
    Path | None,
    typer.Option(
        "--from-run",
        help="Lengths, dropped groups and, without --gpus, trainer speeds as in this run.",
    ),
]
AssumeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--assume",
        help="NAME=VALUE; repeat. Names and defaults: "
        + ", ".join(f"{f.name}={f.default:g}" for f in fields(Assumptions)),
    ),
]


class SiteError(ValueError):
    """An option that cannot be; names it, the value and what would be right."""


def architecture_for(config: Config, model: str | None) -> Architecture:
    """The shape of the model of `config`, or of `model` if it is given. Raises SiteError."""
    try:
        if model is not None:
            return find_model(model)
        if config.model.shape is not None:
            return shaped(config.model.shape)
        assert config.model.path is not None
        path = config.model.path / "config.json"
        if path.is_file():
            return read_config(path)
    except ArchitectureError as error:
        raise SiteError(str(error)) from error
    raise SiteError(
        f"model.path = {config.model.path}: no Hugging Face model there; --model NAME reckons with "
        f"another's shape: {', '.join(PRESETS)}, or the path of a config.json"
    )


def shaped(shape: ModelShape) -> Architecture:
    """What `prepare` makes of `model.shape`, as far as sizes go."""
    return Architecture(
        family=Family.MISTRAL,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.context_length,
        norm_eps=1e-5,
        qkv_bias=False,
        qk_norm=False,
        tied_embeddings=shape.tied_embeddings,
        windows=(None,) * shape.num_layers,
        rope_inv_freq=(),
        rope_attention_factor=1.0,
    )


def site_for(
    config: Config,
    *,
    gpu: str,
    gpus_per_node: int,
    lengths: str | None = None,
    from_run: Path | None = None,
    assume: list[str] | None = None,
    same_layout: bool = False,
    **measured: Any,
) -> Site:
    """`measured` are fields of Site that are known; None leaves them to the model, or to the run
    `from_run`, of which the trainers' speeds count if it had the `same_layout`.

    Raises SiteError.
    """
    if gpu not in GPUS:
        raise SiteError(f"--gpu {gpu}: must be one of {', '.join(GPUS)}")
    # No longer than a mean completion, where these are short.
    prompt = min(ASSUMED_PROMPT_TOKENS, config.reward.l_max * ASSUMED_MEAN_SHARE)
    known: dict[str, Any] = {n: value for n, value in measured.items() if value is not None}
    _check_measured(known)
    known = {"prompt_tokens": prompt} | known
    distribution = _lengths(config, lengths, from_run)
    if from_run is not None:
        known = _seen_in(RunFolder(from_run.resolve()), speeds=same_layout) | known
    if config.verifier.num_slots is not None:
        known = {"verifiers_per_node": config.verifier.num_slots} | known
    return Site(
        gpu=GPUS[gpu],
        gpus_per_node=gpus_per_node,
        lengths=distribution,
        assumed=_assumptions(assume or []),
        **known,
    )


def _check_measured(known: dict[str, Any]) -> None:
    """Options are named as the fields that they fill. Raises SiteError."""
    for name, value in known.items():
        if not isinstance(value, float):
            continue
        option = f"--{name.replace('_', '-')} {value:g}"
        may_be_zero = name != "train_tokens_per_s"
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            raise SiteError(f"{option}: must be {'at least' if may_be_zero else 'more than'} 0")
    update_s, pause_s = known.get("update_s"), known.get("pause_s")
    if pause_s is not None and (update_s is None or pause_s > update_s):
        raise SiteError(
            f"--pause-s {pause_s:g}: is a part of --update-s, which must be given and no less"
        )


def parse_curve(text: str | None) -> SpeedCurve | None:
    """Raises SiteError."""
    try:
        return None if text is None else SpeedCurve.parse(text)
    except ValueError as error:
        raise SiteError(f"--generator-speed {text}: {error}") from error


def _lengths(config: Config, text: str | None, from_run: Path | None) -> Lengths:
    cap = float(config.reward.l_max)
    if text is not None and from_run is not None:
        raise SiteError("--lengths and --from-run: give one of them")
    try:
        if from_run is not None:
            return lengths_of_run(RunFolder(from_run.resolve()), cap)
        if text is not None:
            return parse_lengths(text, cap)
    except LengthsError as error:
        raise SiteError(str(error)) from error
    guess = parse_lengths(f"lognormal:{cap * ASSUMED_MEAN_SHARE:g},{ASSUMED_SIGMA:g}", cap)
    return replace(guess, description=f"{guess.description} (assumed)")


def _seen_in(run: RunFolder, *, speeds: bool) -> dict[str, float]:
    """Fields of Site that a run's metrics tell: means over its RL steps."""
    rows = [row for row in read_rows(run.metrics) if row.get("stage") == "rl"]
    counts = [(row.get("groups_taken", 0.0), row.get("groups_dropped", 0.0)) for row in rows]
    dropped = [dropped / (taken + dropped) for taken, dropped in counts if taken + dropped]
    seen = {"drop_share": min(0.95, fmean(dropped))} if dropped else {}
    if not speeds:
        return seen
    for field, metric in (
        ("train_tokens_per_s", "train_tokens_per_s"),
        ("update_s", "update_total_s"),
        ("pause_s", "update_pause_s"),
    ):
        values = [row[metric] for row in rows if metric in row]
        if values:
            seen[field] = fmean(values)
    return seen


def _assumptions(settings: list[str]) -> Assumptions:
    names = [field.name for field in fields(Assumptions)]
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if name not in names or not equals:
            raise SiteError(
                f"--assume {setting}: must be NAME=VALUE, NAME one of {', '.join(names)}"
            )
        try:
            values[name] = float(text)
        except ValueError:
            raise SiteError(f"--assume {setting}: {text!r} is not a number") from None
        is_share = not name.endswith(("_s", "_gib"))
        if not math.isfinite(values[name]) or values[name] < 0:
            raise SiteError(f"--assume {setting}: must be at least 0")
        if is_share and not 0 < values[name] <= 1:
            raise SiteError(f"--assume {setting}: is a share, more than 0 and at most 1")
    return Assumptions(**values)
