"""`magistral import-gguf FILE DIR`: a GGUF file of a Llama-shaped model as a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_magistral.config import DType


def import_gguf_command(
    file: Annotated[Path, typer.Argument(help="A GGUF file.", exists=True, dir_okay=False)],
    directory: Annotated[Path, typer.Argument(help="Where the model goes; replaced if it exists.")],
    dtype: Annotated[DType, typer.Option(help="Of the weights as they are written.")] = (
        DType.FLOAT32
    ),
) -> None:
    """Convert a GGUF file to a Hugging Face directory, which `model.path` can name."""
    # Cost seconds, which only this command should pay.
    import torch

    from megatron_magistral.weights.architecture import ArchitectureError
    from megatron_magistral.weights.gguf import GgufError, import_gguf

    try:
        arch = import_gguf(file, directory, getattr(torch, dtype))
    except (ArchitectureError, GgufError) as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None
    typer.echo(
        f"{directory}: {arch.num_layers} layers, hidden size {arch.hidden_size}, "
        f"{arch.num_heads} heads, {arch.num_kv_heads} kv heads, vocabulary {arch.vocab_size}"
    )
