"""Tiny Hugging Face models of every family, and sequences to train them on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron_magistral.types import Span, TrainSequence

# Imported on first use otherwise, which takes seconds in every rank that a test starts.
for _family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe"):
    getattr(transformers, f"{_family}ForCausalLM")

# Two threads on tiny tensors gain nothing, and wait for each other where cores are few.
torch.set_num_threads(1)

VOCAB_SIZE = 131  # prime: padded under every tensor-parallel size

EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": dict(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=96,
        norm_topk_prob=False,
    ),
    "qwen3_moe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        head_dim=16,
    ),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(),
    "mistral": dict(sliding_window=8),
    "qwen2": dict(),
    "qwen3": dict(head_dim=16),  # not hidden_size / num_heads, as in the released models
} | EXPERT_FAMILIES


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
    config._attn_implementation = config._experts_implementation = "eager"
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


def by_checkpoint_name(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors under the names of a checkpoint, in which every expert has its own three:
    `transformers` holds those of a layer in two. Views."""
    found = {}
    for name, tensor in tensors.items():
        layer, experts, fused = name.partition(".experts.")
        if not experts:
            found[name] = tensor
            continue
        for number, of_expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
            for part, matrix in zip(names, of_expert.chunk(len(names)), strict=True):
                found[f"{layer}.experts.{number}.{part}.weight"] = matrix
    return {_mixtral_name(n): t for n, t in found.items()} if family == "mixtral" else found


def _mixtral_name(name: str) -> str:
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(ours, theirs)
    return name


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
