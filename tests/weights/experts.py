"""Tiny Hugging Face models with experts, and their configs alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers

EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": dict(intermediate_size=48, num_local_experts=4),
    "qwen3_moe": dict(moe_intermediate_size=48, num_experts=4, head_dim=16, mlp_only_layers=[]),
}


def expert_config(family: str, *, tied: bool = False) -> Any:
    options = dict(
        vocab_size=131,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    return transformers.AutoConfig.for_model(family, **(options | EXPERT_FAMILIES[family]))


def expert_model(family: str, *, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = expert_config(family, tied=tied)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
