"""Models by name, for plans and benchmarks of models that are not at hand. Shapes alone."""

from __future__ import annotations

import math
from pathlib import Path

from megatron_magistral.weights.architecture import (
    Architecture,
    ArchitectureError,
    Experts,
    Family,
    read_config,
)
from megatron_magistral.weights.placement import TrainerLayout, tensors

MIB = 1 << 20


def _shape(
    family: Family,
    *,
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    experts: Experts | None = None,
) -> Architecture:
    """What does not matter to a plan (norm constants, RoPE, windows) is left at any value."""
    return Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=40_960,
        norm_eps=1e-5,
        qkv_bias=False,
        qk_norm=family is Family.QWEN3_MOE,
        tied_embeddings=False,
        windows=(None,) * num_layers,
        rope_inv_freq=(),
        rope_attention_factor=1.0,
        experts=experts,
    )


PRESETS = {
    # The released config: 23.6e9 parameters.
    "magistral-small-24b": _shape(
        Family.MISTRAL,
        num_layers=40,
        hidden_size=5120,
        ffn_hidden_size=32_768,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=131_072,
    ),
    # The shape of Mistral Large 2: 122.6e9 parameters.
    "dense-120b": _shape(
        Family.MISTRAL,
        num_layers=88,
        hidden_size=12_288,
        ffn_hidden_size=28_672,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32_768,
    ),
    # Assumed: 256 experts of the size that DeepSeek-V3 has, with grouped-query attention, and
    # powers of two that every layout divides: 706e9 parameters.
    "moe-700b": _shape(
        Family.QWEN3_MOE,
        num_layers=64,
        hidden_size=6912,
        ffn_hidden_size=2048,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=131_072,
        experts=Experts(num=256, ffn_hidden_size=2048, top_k=8, normalises_scores=True),
    ),
}


def sized(size_mib: float) -> Architecture:
    """A Llama of about `size_mib` MiB in 16 bits, with 4 layers or a multiple of them.

    Its depth grows with the cube root of its size, about as that of released models does: 12 layers
    at 0.25e9 parameters, 84 at 120e9.
    """
    target = size_mib * MIB / 2
    layers = max(4, 4 * round(0.43 * (target / 1e6) ** (1 / 3)))

    def make(hidden_size: int) -> Architecture:
        return _shape(
            Family.LLAMA,
            num_layers=layers,
            hidden_size=hidden_size,
            ffn_hidden_size=4 * hidden_size,
            num_heads=8,
            num_kv_heads=4,
            head_dim=hidden_size // 8,
            vocab_size=2048,
        )

    estimate = math.sqrt(target / (layers * 14.5))
    widths = range(64, max(128, 2 * int(estimate)), 64)
    return min((make(width) for width in widths), key=lambda a: abs(num_parameters(a) - target))


def num_parameters(arch: Architecture) -> int:
    return sum(tensor.num_elements for tensor in tensors(arch, TrainerLayout()))


def find_model(text: str) -> Architecture:
    """A preset by name, the `config.json` at a path, or a size in MiB. Raises ArchitectureError."""
    if text in PRESETS:
        return PRESETS[text]
    try:
        size_mib = float(text)
    except ValueError:
        path = Path(text)
        if path.is_dir():
            path /= "config.json"
        if not path.is_file():
            known = ", ".join(PRESETS)
            raise ArchitectureError(
                f"model = {text!r}: must be one of {known}, the path of a config.json, or MiB"
            ) from None
        return read_config(path)
    if not 1 <= size_mib <= 1 << 20:
        raise ArchitectureError(f"model = {text!r}: a size must be from 1 to {1 << 20} MiB")
    return sized(size_mib)
