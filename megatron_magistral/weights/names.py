"""Megatron's parameters and Hugging Face's: names, fusions, tensor-parallel shards. Pure.

    Hugging Face tensors --shard()--> one tensor-parallel rank's part of a Megatron parameter
    all ranks' parts   --unshard()--> Hugging Face tensors, bit for bit

Megatron fuses q, k, v into one matrix and gate, up into another:

    qkv      per kv group: the rows of its queries, of its key, of its value   [q q k v | q q k v]
    gate_up  per tensor-parallel rank: its rows of gate, then its rows of up   [g u | g u]

so a shard is a contiguous piece of neither Hugging Face tensor. RoPE needs no permutation:
both rotate the two halves of a head.

Shapes: H hidden size, F feed-forward size, V vocabulary, A attention heads, K kv heads of size D.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from megatron_magistral.weights.architecture import Architecture


class Split(StrEnum):
    """How a parameter is divided over tensor-parallel ranks."""

    REPLICATED = "replicated"
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"  # rows, padded with zeros to a multiple of the ranks
    QKV = "qkv"
    GATE_UP = "gate_up"


@dataclass(frozen=True)
class Param:
    """A Megatron parameter and the Hugging Face tensors that it is made of.

    `name` has the layer's number in the whole model, whatever stage holds it. `num_groups` is the
    number of kv groups where `split` is QKV, and unused otherwise. `is_copy` marks the output
    layer of a tied model on its last pipeline stage: loaded like any other, never exported.
    """

    name: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    split: Split
    num_groups: int = 1
    is_copy: bool = False


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The smallest multiple of `tp_size` with room for the vocabulary."""
    return -(-vocab_size // tp_size) * tp_size


def parameters(arch: Architecture, fused_norms: bool = False) -> dict[str, Param]:
    """Every parameter of the model by its Megatron name, in the order of computation.

    `fused_norms` is Transformer Engine's naming, where a norm belongs to the linear layer after it.
    """
    H, V = arch.hidden_size, arch.vocab_size
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied = arch.tied_embeddings
    params = [
        Param("embedding.word_embeddings.weight", (embedding,), ((V, H),), Split.VOCABULARY),
        *(p for i in range(arch.num_layers) for p in _layer(arch, i, fused_norms)),
        Param("decoder.final_layernorm.weight", ("model.norm.weight",), ((H,),), Split.REPLICATED),
        Param(
            "output_layer.weight",
            (embedding if tied else head,),
            ((V, H),),
            Split.VOCABULARY,
            is_copy=tied,
        ),
    ]
    return {p.name: p for p in params}


def _layer(arch: Architecture, index: int, fused_norms: bool) -> Iterator[Param]:
    H, F, D = arch.hidden_size, arch.ffn_hidden_size, arch.head_dim
    AD, KD = arch.num_heads * D, arch.num_kv_heads * D
    ours, theirs = f"decoder.layers.{index}.", f"model.layers.{index}."
    attention_norm, mlp_norm = (
        ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if fused_norms
        else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    )

    def param(
        name: str, sources: Sequence[str], shapes: Sequence[tuple[int, ...]], split: Split
    ) -> Param:
        names = tuple(theirs + source for source in sources)
        return Param(ours + name, names, tuple(shapes), split, num_groups=arch.num_kv_heads)

    qkv = tuple(f"self_attn.{x}_proj" for x in "qkv")
    yield param(attention_norm, ["input_layernorm.weight"], [(H,)], Split.REPLICATED)
    yield param(
        "self_attention.linear_qkv.weight",
        [x + ".weight" for x in qkv],
        [(AD, H), (KD, H), (KD, H)],
        Split.QKV,
    )
    if arch.qkv_bias:
        yield param(
            "self_attention.linear_qkv.bias",
            [x + ".bias" for x in qkv],
            [(AD,), (KD,), (KD,)],
            Split.QKV,
        )
    if arch.qk_norm:
        for x in "qk":
            yield param(
                f"self_attention.{x}_layernorm.weight",
                [f"self_attn.{x}_norm.weight"],
                [(D,)],
                Split.REPLICATED,
            )
    yield param(
        "self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], [(H, AD)], Split.COLUMNS
    )
    yield param(mlp_norm, ["post_attention_layernorm.weight"], [(H,)], Split.REPLICATED)
    yield param(
        "mlp.linear_fc1.weight",
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        [(F, H), (F, H)],
        Split.GATE_UP,
    )
    yield param("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], [(H, F)], Split.COLUMNS)


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The tensors that a Hugging Face checkpoint of this architecture has, with their shapes."""
    return {
        source: shape
        for param in parameters(arch).values()
        for source, shape in zip(param.sources, param.shapes, strict=True)
    }


def shard_shape(param: Param, tp_size: int) -> tuple[int, ...]:
    """The shape of one tensor-parallel rank's part."""
    rows, *rest = param.shapes[0]
    match param.split:
        case Split.REPLICATED:
            return param.shapes[0]
        case Split.COLUMNS:
            return (rows, rest[0] // tp_size, *rest[1:])
        case Split.VOCABULARY:
            return (padded_vocab_size(rows, tp_size) // tp_size, *rest)
        case Split.QKV | Split.GATE_UP:
            return (sum(shape[0] for shape in param.shapes) // tp_size, *rest)


def shard(param: Param, sources: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
    """The part of `param` that rank `tp_rank` of `tp_size` holds, from its Hugging Face tensors
    (in the order of `param.sources`). The result may be a view of its input."""
    first = sources[0]
    match param.split:
        case Split.REPLICATED:
            return first
        case Split.COLUMNS:
            return first.chunk(tp_size, dim=1)[tp_rank]
        case Split.VOCABULARY:
            missing = padded_vocab_size(len(first), tp_size) - len(first)
            padded = torch.cat([first, first.new_zeros(missing, *first.shape[1:])])
            return padded.chunk(tp_size)[tp_rank]
        case Split.QKV:
            groups = [t.reshape(param.num_groups, -1, *t.shape[1:]) for t in sources]
            fused = torch.cat(groups, dim=1).chunk(tp_size)[tp_rank]  # [K / tp, (A/K + 2) D, ...]
            return fused.flatten(0, 1)
        case Split.GATE_UP:
            return torch.cat([t.chunk(tp_size)[tp_rank] for t in sources])


def unshard(param: Param, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The Hugging Face tensors (name, full tensor) of `param` from the parts of all
    tensor-parallel ranks, in rank order. A result may be a view of its input."""
    first = shards[0]
    match param.split:
        case Split.REPLICATED:
            tensors = [first]
        case Split.COLUMNS:
            tensors = [torch.cat(list(shards), dim=1)]
        case Split.VOCABULARY:
            tensors = [torch.cat(list(shards))[: param.shapes[0][0]]]
        case Split.QKV:
            rows = [shape[0] // param.num_groups for shape in param.shapes]
            grouped = torch.cat(list(shards)).reshape(param.num_groups, sum(rows), *first.shape[1:])
            tensors = [t.flatten(0, 1) for t in grouped.split(rows, dim=1)]
        case Split.GATE_UP:
            halves = [part.chunk(2) for part in shards]
            tensors = [torch.cat(half) for half in zip(*halves, strict=True)]
    return list(zip(param.sources, tensors, strict=True))
