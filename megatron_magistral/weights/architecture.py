"""What a Hugging Face `config.json` says about a model, as one value.

Read once at the edge; everything below (layouts, names, the Megatron model) takes an
`Architecture` and never looks at a Hugging Face object.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class ArchitectureError(ValueError):
    """A model that cannot be trained; the message names the file, the key, and what would be."""


class Family(StrEnum):
    """Model families that have a mapping to Megatron, by `model_type`."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MIXTRAL = "mixtral"
    QWEN2_MOE = "qwen2_moe"
    QWEN3_MOE = "qwen3_moe"


_QKV_BIAS_FAMILIES = frozenset({Family.QWEN2, Family.QWEN2_MOE})
_QK_NORM_FAMILIES = frozenset({Family.QWEN3, Family.QWEN3_MOE})


# "dynamic" and "longrope" change their frequencies with the length of the sequence, and packed
# sequences share one table.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


# What transformers raises for a config that it cannot take.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)


@dataclass(frozen=True)
class Experts:
    """The feed-forward part of every layer: `num` SwiGLU experts, of which each token goes to the
    `top_k` that its router scores highest, and the sum of their outputs by score.

    Scores are a softmax over all experts; where `normalises_scores`, those of the `top_k` are
    scaled to a sum of 1. A shared expert, if there is one, takes every token; its output is gated
    by a sigmoid.
    """

    num: int
    ffn_hidden_size: int
    top_k: int
    normalises_scores: bool
    shared_ffn_hidden_size: int | None = None


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    `experts` replaces the one feed-forward part of size `ffn_hidden_size`. `windows[i]` is how many
    tokens, itself included, a token of layer i attends to; None is all. `rope_inv_freq` holds
    head_dim / 2 inverse frequencies; scaled RoPE variants are folded into it.
    `rope_attention_factor` multiplies queries and keys after rotation (YaRN).
    """

    family: Family
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    rope_inv_freq: tuple[float, ...]
    rope_attention_factor: float
    experts: Experts | None = None


def read_architecture(hf_dir: Path) -> Architecture:
    """The architecture of the model in `hf_dir`. Raises ArchitectureError if there is none, or
    none that can be trained."""
    path = hf_dir / "config.json"
    if not path.is_file():
        raise ArchitectureError(f"{path}: no such file; a Hugging Face model directory has one")
    return read_config(path)


def read_config(path: Path) -> Architecture:
    """The architecture that one `config.json` describes. Raises ArchitectureError."""
    try:
        described = json.loads(path.read_bytes())
        if not isinstance(described, dict):
            raise ArchitectureError("is not a JSON object")
        # Before transformers looks at it, which would offer to run the code that came with it.
        _check_family(described.get("model_type"))
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        return architecture_of(config)
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise ArchitectureError(f"{path}: {reason}") from None


def architecture_of(config: transformers.PretrainedConfig) -> Architecture:
    """The architecture that a Hugging Face config describes. Raises ArchitectureError."""
    family = _check_family(config.model_type)
    _refuse_variants(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inv_freq, attention_factor = _rope(config, head_dim)
    return Architecture(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        qkv_bias=family in _QKV_BIAS_FAMILIES,
        qk_norm=family in _QK_NORM_FAMILIES,
        tied_embeddings=bool(config.tie_word_embeddings),
        windows=_windows(config),
        rope_inv_freq=inv_freq,
        rope_attention_factor=attention_factor,
        experts=_experts(family, config),
    )


def _check_family(model_type: str | None) -> Family:
    if model_type not in tuple(Family):
        known = ", ".join(Family)
        raise ArchitectureError(f"model_type={model_type!r} is unknown; known: {known}")
    return Family(model_type)


def _experts(family: Family, config: transformers.PretrainedConfig) -> Experts | None:
    match family:
        case Family.MIXTRAL:
            experts = Experts(
                num=config.num_local_experts,
                ffn_hidden_size=config.intermediate_size,
                top_k=config.num_experts_per_tok,
                normalises_scores=True,
            )
        case Family.QWEN2_MOE | Family.QWEN3_MOE:
            experts = Experts(
                num=config.num_experts,
                ffn_hidden_size=config.moe_intermediate_size,
                top_k=config.num_experts_per_tok,
                normalises_scores=config.norm_topk_prob,
                shared_ffn_hidden_size=getattr(config, "shared_expert_intermediate_size", None),
            )
        case _:
            return None
    if not 1 <= experts.top_k <= experts.num:
        raise ArchitectureError(
            f"num_experts_per_tok={experts.top_k} must be from 1 to the {experts.num} experts"
        )
    if experts.top_k == 1 and experts.normalises_scores:
        raise ArchitectureError(
            "num_experts_per_tok=1 with normalised scores is not supported: every score is 1, so "
            "that the router cannot learn"
        )
    return experts


def _refuse_variants(config: transformers.PretrainedConfig) -> None:
    """Options of these families that no released model uses have no mapping."""
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "qkv_bias": (True, None),  # an option of Qwen2-MoE alone
        "partial_rotary_factor": (1.0, None),
        "decoder_sparse_step": (1, None),  # experts in every layer, or in none
        "mlp_only_layers": ([], None),
    }
    for key, values in wanted.items():
        value = (config.rope_parameters or {}).get(key, getattr(config, key, None))
        if value not in values:
            raise ArchitectureError(f"{key}={value!r} is not supported; must be {values[0]!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ArchitectureError(
            f"num_key_value_heads={config.num_key_value_heads} must divide "
            f"num_attention_heads={config.num_attention_heads}"
        )


def _windows(config: transformers.PretrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    windows: tuple[int | None, ...] = (window,) * config.num_hidden_layers
    if layer_types is not None:
        windows = tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    if any(each is not None and each < 1 for each in windows):
        raise ArchitectureError(f"sliding_window={window} must be at least 1, or null for none")
    return windows


def _rope(config: transformers.PretrainedConfig, head_dim: int) -> tuple[tuple[float, ...], float]:
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        known = ", ".join(_ROPE_TYPES)
        raise ArchitectureError(f"rope_type={rope_type!r} is not supported; known: {known}")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0
    rope_init = ROPE_INIT_FUNCTIONS[rope_type]
    inv_freq, attention_factor = rope_init(config, device="cpu")
    return tuple(inv_freq.tolist()), float(attention_factor)
