"""A small tokenizer of its own for the tiny world, and the model that is trained from random.

Both are written in Hugging Face's layout, so that everything downstream reads them as it reads any
released model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
THINK_TAGS = ("<think>", "</think>")

# Words with the space before them, runs of symbols, single digits, white space.
_PIECES = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s")


@dataclass(frozen=True)
class TinyModelShape:
    """The shape of the initial model. Divisible by 2 wherever TP = 2 or PP = 2 has to divide."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False


def build_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` ids on `texts`.

    Bytes are the base, so every text survives encode and decode. Digits are single tokens. The
    think tags are single tokens too but not special: decoding keeps them whatever is skipped. BOS
    is put before a text unless `add_special_tokens=False`. If the texts yield fewer merges than
    asked for, reserved tokens fill the rest: every id below `vocab_size` decodes.

    Raises ValueError if `vocab_size` leaves no room beside the bytes and the named tokens.
    """
    named = [PAD, BOS, EOS, *THINK_TAGS]
    smallest = len(named) + len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < smallest:
        raise ValueError(f"vocab_size is {vocab_size}; it must be at least {smallest}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=named,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = (_without_tags(text) for text in texts)
    backend.train_from_iterator(plain, trainer=trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in THINK_TAGS])
    spare = vocab_size - backend.get_vocab_size()
    backend.add_special_tokens([f"<reserved_{index}>" for index in range(spare)])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def build_initial_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    shape: TinyModelShape,
    seed: int,
) -> None:
    """Write a Hugging Face model directory: config, tokenizer and random weights in safetensors.

    The caller's random state is left as it was.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        **asdict(shape),
        "head_dim": shape.hidden_size // shape.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 1.0 / math.sqrt(shape.hidden_size),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = _random_weights(shape, len(tokenizer), seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


def _random_weights(shape: TinyModelShape, vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Weights under Hugging Face's names, each [out, in].

    Their standard deviation is 1 / sqrt(hidden_size), which keeps activations near unit size at
    this width (the usual 0.02 belongs to widths in the thousands). The two projections that write
    to the residual stream are divided by sqrt(2 * layers), so that it does not grow with depth.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_attention_heads * shape.num_key_value_heads
    std = 1.0 / math.sqrt(hidden)
    residual_std = std / math.sqrt(2 * shape.num_hidden_layers)

    def normal(rows: int, columns: int, std: float = std) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    weights = {"model.embed_tokens.weight": normal(vocab_size, hidden)}
    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}"
        weights |= {
            f"{layer}.input_layernorm.weight": torch.ones(hidden),
            f"{layer}.self_attn.q_proj.weight": normal(hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": normal(kv, hidden),
            f"{layer}.self_attn.v_proj.weight": normal(kv, hidden),
            f"{layer}.self_attn.o_proj.weight": normal(hidden, hidden, residual_std),
            f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{layer}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{layer}.mlp.up_proj.weight": normal(inner, hidden),
            f"{layer}.mlp.down_proj.weight": normal(hidden, inner, residual_std),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    if not shape.tie_word_embeddings:
        weights["lm_head.weight"] = normal(vocab_size, hidden)
    return weights


def _without_tags(text: str) -> str:
    """The think tags are tokens of their own; merges must not be spent on their pieces."""
    for tag in THINK_TAGS:
        text = text.replace(tag, "\n")
    return text
