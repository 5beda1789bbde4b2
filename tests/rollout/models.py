"""Tiny models for real servers."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def random_model(seed: int) -> LlamaForCausalLM:
    """Two layers with weights so large that distributions are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).float().eval()
