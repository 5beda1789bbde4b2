"""What the trainer will send against what an engine can hold, before any byte is sent.

An engine answers a manifest (every tensor's name, shape and dtype) with where its model would load
each of them, rank by rank (rollout/sglang_weights.py). From that follows whether each element of
each tensor is held by some rank, and each element of each parameter written by some tensor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import msgspec
import torch

from megatron_magistral.rollout.engine import (
    EngineControl,
    EngineMismatch,
    EngineRefused,
    Phase,
    TensorSpec,
)
from megatron_magistral.rollout.sglang_weights import Placement
from megatron_magistral.weights.parts import View

# An error names so many tensors and the number of the others.
MAX_NAMED = 5


# By tensor, then by rank: the elements that each of the rank's copies holds.
Layout = dict[str, list[list[View]]]


def manifest_of(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[TensorSpec, ...]:
    """The manifest of tensors that are all sent in `dtype`."""
    text = str(dtype).removeprefix("torch.")
    return tuple(TensorSpec(name, shape, text) for name, shape in shapes.items())


async def place(
    engine: EngineControl, manifest: Sequence[TensorSpec], *, in_place: bool = False
) -> Layout:
    """Where `engine` would hold the tensors of `manifest`. Changes nothing. `in_place`: they will
    not go through its loader.

    Raises:
        EngineMismatch: names every tensor that is extra, missing, or of a wrong shape or dtype.
    """
    start = time.monotonic()
    question = {"place": [asdict(spec) for spec in manifest]}
    answers = await engine.ask_about_weights(Phase.MANIFEST, question, engine.timeouts.checksum_s)
    try:
        ranks = msgspec.convert(answers, list[Placement])
    except msgspec.ValidationError as error:
        elapsed_s = time.monotonic() - start
        raise EngineRefused(engine.name, Phase.MANIFEST, elapsed_s, str(error)) from error
    if found := problems(manifest, ranks, in_place=in_place):
        elapsed_s = time.monotonic() - start
        raise EngineMismatch(engine.name, Phase.MANIFEST, elapsed_s, "; ".join(found))
    return {
        spec.name: [[copy.source for copy in rank.copies[spec.name]] for rank in ranks]
        for spec in manifest
    }


def problems(
    manifest: Sequence[TensorSpec], ranks: Sequence[Placement], *, in_place: bool = False
) -> list[str]:
    """What is wrong, one sentence a kind; empty if the manifest fits the engine exactly. Pure."""
    refused = {name: why for rank in ranks for name, why in rank.refused.items()}
    unknown, wrong_dtype, partial = [], [], []
    for spec in manifest:
        copies = [copy for rank in ranks for copy in rank.copies[spec.name]]
        if spec.name in refused:
            continue
        if not copies:
            unknown.append(spec.name)
            continue
        others = sorted({copy.dtype for copy in copies} - {spec.dtype})
        if others:
            wrong_dtype.append(f"{spec.name} is {spec.dtype}, the engine holds {others[0]}")
        num_held = sum(view.num_elements for view in {copy.source for copy in copies})
        num_elements = torch.Size(spec.shape).numel()
        if num_held != num_elements:
            held = f"{num_held} of {num_elements} elements of {list(spec.shape)}"
            partial.append(f"{spec.name}: the engine holds {held}")
    unfilled = [
        f"{name} ({count} elements)"
        for name, count in {n: c for rank in ranks for n, c in rank.unfilled.items()}.items()
    ]
    linked = sorted({name for rank in ranks for name in rank.linked}) if in_place else []
    shapes = {spec.name: list(spec.shape) for spec in manifest}
    kinds = (
        ("extra, the engine's model has no such tensor", unknown),
        ("wrong shape", [f"{n} {shapes[n]}: {why}" for n, why in refused.items()] + partial),
        ("wrong dtype", wrong_dtype),
        # What a refused tensor leaves unfilled is not another problem.
        ("missing, parameters that nothing would fill", [] if refused else unfilled),
        ("filled from others by the engine's loader, which only the plan `gather` runs", linked),
    )
    return [f"{kind}: {some(names)}" for kind, names in kinds if names]


def some(names: Sequence[str]) -> str:
    """The first few of `names` for an error, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
