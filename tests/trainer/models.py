"""Tiny Hugging Face models of every family, and sequences to train them on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron_magistral.types import Span, TrainSequence

# Imported on first use otherwise, which takes seconds in every rank that a test starts.
for _family in ("llama", "mistral", "qwen2", "qwen3"):
    getattr(transformers, f"{_family.capitalize()}ForCausalLM")

# Two threads on tiny tensors gain nothing, and wait for each other where cores are few.
torch.set_num_threads(1)

VOCAB_SIZE = 131  # prime: padded under every tensor-parallel size

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(),
    "mistral": dict(sliding_window=8),
    "qwen2": dict(),
    "qwen3": dict(head_dim=16),  # not hidden_size / num_heads, as in the released models
}


def hf_model(family: str, *, tied: bool = False, seed: int = 0, **overrides: Any) -> Any:
    """A random model whose every tensor, norms and biases too, differs from its usual start."""
    options = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    config = transformers.AutoConfig.for_model(family, **(options | FAMILIES[family] | overrides))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn_like(p) * (0.05 if p.dim() > 1 else 0.1)
            p.copy_(noise + (1.0 if "norm" in name else 0.0))
    return model.eval()


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def random_sequences(
    lengths: list[tuple[int, int]], seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> list[TrainSequence]:
    """One sequence for each (prompt tokens, output tokens)."""
    rng = random.Random(seed)
    return [
        TrainSequence(
            tokens=tuple(rng.randrange(vocab_size) for _ in range(prompt + output)),
            num_prompt_tokens=prompt,
            logprobs=tuple(rng.uniform(-6, -4) for _ in range(output)),
            spans=(Span(0, 0, output),),
            advantage=rng.uniform(-2, 2),
            weight=rng.uniform(0.5, 1.5) / max(1, sum(output for _, output in lengths)),
        )
        for prompt, output in lengths
    ]
