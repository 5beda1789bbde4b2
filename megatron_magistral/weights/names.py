"""Megatron's parameters and Hugging Face's: names, fusions, tensor-parallel shards. Pure.

    Hugging Face tensors --shard()--> one tensor-parallel rank's part of a Megatron parameter
    all ranks' parts   --unshard()--> Hugging Face tensors, bit for bit

Megatron fuses q, k, v into one matrix and gate, up into another:

    qkv      per kv group: the rows of its queries, of its key, of its value   [q q k v | q q k v]
    gate_up  per tensor-parallel rank: its rows of gate, then its rows of up   [g u | g u]

so a shard is a contiguous piece of neither Hugging Face tensor. RoPE needs no permutation:
both rotate the two halves of a head.

A layer's experts are dealt to expert-parallel ranks in equal runs, and are then whole there; where
that is one rank, each expert is divided over the tensor-parallel ranks like any feed-forward part.

Shapes: H hidden size, F feed-forward size (of one expert), V vocabulary, A attention heads,
K kv heads of size D, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from megatron_magistral.weights.architecture import Architecture, Family


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
    `expert` is the number in the whole model of the expert that the parameter belongs to.
    """

    name: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    split: Split
    num_groups: int = 1
    is_copy: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class _ExpertNames:
    """What a family calls the router and the three matrices of an expert, below a layer."""

    router: str
    gate: str
    up: str
    down: str


_QWEN_EXPERT_NAMES = _ExpertNames(
    "mlp.gate.weight",
    "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.{}.up_proj.weight",
    "mlp.experts.{}.down_proj.weight",
)
_EXPERT_NAMES = {
    Family.MIXTRAL: _ExpertNames(
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
        "block_sparse_moe.experts.{}.w2.weight",
    ),
    Family.QWEN2_MOE: _QWEN_EXPERT_NAMES,
    Family.QWEN3_MOE: _QWEN_EXPERT_NAMES,
}


# A local expert of Megatron's: as a module of its own, or as a row of a grouped multiplication.
_SEQUENTIAL = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc\d\.weight)")
_GROUPED = re.compile(r"experts\.(linear_fc\d\.weight)(\d+)")


def name_in_model(name: str, layers: Sequence[int], first_expert: int) -> str:
    """A parameter's name in the whole model, from its name in one chunk of it: layer i there is
    layer `layers[i]`, and expert 0 of a layer is expert `first_expert`."""
    if not name.startswith("decoder.layers."):
        return name
    index, rest = name.removeprefix("decoder.layers.").split(".", 1)

    def numbered(expert: str, parameter: str) -> str:
        return f"experts.local_experts.{first_expert + int(expert)}.{parameter}"

    rest = _SEQUENTIAL.sub(lambda match: numbered(match[1], match[2]), rest)
    rest = _GROUPED.sub(lambda match: numbered(match[2], match[1]), rest)
    return f"decoder.layers.{layers[int(index)]}.{rest}"


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
    ours, theirs = f"decoder.layers.{index}.", f"model.layers.{index}."
    for param in (*_attention(arch, fused_norms), *_feed_forward(arch, fused_norms)):
        sources = tuple(theirs + source for source in param.sources)
        yield replace(param, name=ours + param.name, sources=sources)


def _attention(arch: Architecture, fused_norms: bool) -> Iterator[Param]:
    H, D, K = arch.hidden_size, arch.head_dim, arch.num_kv_heads
    AD, KD = arch.num_heads * D, K * D
    norm = (
        "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    )
    linear = "self_attention.linear_qkv."
    yield Param(norm, ("input_layernorm.weight",), ((H,),), Split.REPLICATED)
    weights = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
    yield Param(linear + "weight", weights, ((AD, H), (KD, H), (KD, H)), Split.QKV, num_groups=K)
    if arch.qkv_bias:
        biases = tuple(f"self_attn.{x}_proj.bias" for x in "qkv")
        yield Param(linear + "bias", biases, ((AD,), (KD,), (KD,)), Split.QKV, num_groups=K)
    if arch.qk_norm:
        for x in "qk":
            name, source = f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight"
            yield Param(name, (source,), ((D,),), Split.REPLICATED)
    output = "self_attention.linear_proj.weight"
    yield Param(output, ("self_attn.o_proj.weight",), ((H, AD),), Split.COLUMNS)


def _feed_forward(arch: Architecture, fused_norms: bool) -> Iterator[Param]:
    H = arch.hidden_size
    # Several linear layers follow the norm before experts: it is never fused into one of them.
    fused = fused_norms and arch.experts is None
    norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
    yield Param(norm, ("post_attention_layernorm.weight",), ((H,),), Split.REPLICATED)
    if arch.experts is None:
        names = tuple(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
        yield from _swiglu("mlp.", names, H, arch.ffn_hidden_size)
        return
    table, experts = _EXPERT_NAMES[arch.family], arch.experts
    yield Param("mlp.router.weight", (table.router,), ((experts.num, H),), Split.REPLICATED)
    for e in range(experts.num):
        names = tuple(name.format(e) for name in (table.gate, table.up, table.down))
        for param in _swiglu(f"mlp.experts.local_experts.{e}.", names, H, experts.ffn_hidden_size):
            yield replace(param, expert=e)
    if experts.shared_ffn_hidden_size is not None:
        names = tuple(f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down"))
        yield from _swiglu("mlp.shared_experts.", names, H, experts.shared_ffn_hidden_size)
        gate = ("mlp.shared_expert_gate.weight",)
        yield Param("mlp.shared_experts.gate_weight", gate, ((1, H),), Split.REPLICATED)


def _swiglu(ours: str, theirs: Sequence[str], H: int, F: int) -> Iterator[Param]:
    gate, up, down = theirs
    yield Param(ours + "linear_fc1.weight", (gate, up), ((F, H), (F, H)), Split.GATE_UP)
    yield Param(ours + "linear_fc2.weight", (down,), ((H, F),), Split.COLUMNS)


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


def local_parts(param: Param, shard: Tensor, tp_size: int) -> list[Tensor]:
    """What the part of one of `tp_size` ranks holds of each Hugging Face tensor of `param`, in the
    order of `param.sources`. The parts of all ranks follow each other in the whole tensor, along
    its columns where `split` is COLUMNS and along its rows elsewhere."""
    views = local_views(param, shard, tp_size)
    return [v.flatten(0, 1) if v.dim() > shard.dim() else v for v in views]


def local_views(param: Param, shard: Tensor, tp_size: int) -> list[Tensor]:
    """`local_parts` as views of `shard`; of a QKV parameter the rows are divided into groups,
    which lie apart: [groups, rows of a group, ...]."""
    match param.split:
        case Split.REPLICATED | Split.COLUMNS | Split.VOCABULARY:
            return [shard]
        case Split.QKV:
            rows = [shape[0] // param.num_groups for shape in param.shapes]
            grouped = shard.reshape(param.num_groups // tp_size, sum(rows), *shard.shape[1:])
            return list(grouped.split(rows, dim=1))
        case Split.GATE_UP:
            return list(shard.chunk(2))


def unshard(param: Param, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """The Hugging Face tensors (name, full tensor) of `param` from the parts of all
    tensor-parallel ranks, in rank order. A result may be a view of its input."""
    if param.split is Split.REPLICATED:
        return [(param.sources[0], shards[0])]
    axis = 1 if param.split is Split.COLUMNS else 0
    parts = zip(*(local_parts(param, part, len(shards)) for part in shards), strict=True)
    whole = [torch.cat(list(of_all_ranks), dim=axis) for of_all_ranks in parts]
    # Padding rows come last.
    whole = [t[: shape[0]] for t, shape in zip(whole, param.shapes, strict=True)]
    return list(zip(param.sources, whole, strict=True))
