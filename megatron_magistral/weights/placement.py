"""Which part of every tensor a trainer rank holds, and which a generator rank needs. Pure.

Both sides divide a Hugging Face tensor along at most one axis, and along the same one, so every
part is a range of rows or of columns:

    split        axis      trainer (Megatron)             generator (SGLang)
    replicated   none      whole, on every rank           whole, on every rank
    columns      columns   equal parts                    equal parts
    vocabulary   rows      padded to the ranks            padded to 64 and the ranks
    qkv          rows      equal parts of q, of k, of v   equal parts; a kv head is never divided:
                                                          where ranks are more, several share one
    gate_up      rows      equal parts of gate, of up     equal parts of gate, of up
    an expert    as above  on one expert-parallel rank    on one expert-parallel rank

Padding rows are nobody's: they are zero on both sides and never travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_magistral.trainer.layout import LayoutError, ParallelLayout, check_layout
from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.names import Param, Split, padded_vocab_size, parameters

ENGINE_VOCABULARY_MULTIPLE = 64  # sglang.srt.layers.vocab_parallel_embedding


@dataclass(frozen=True, kw_only=True)
class TrainerLayout(ParallelLayout):
    """The trainer's ranks, numbered as Megatron does: tp, dp, pp from the fastest to the slowest;
    etp, ep, the rest, pp for experts."""

    @property
    def dense_copies(self) -> int:
        """How many ranks of a stage hold the same part of what is no expert."""
        return self.dp

    @property
    def expert_copies(self) -> int:
        return self.tp * self.dp // (self.etp * self.ep)

    def dense_rank(self, stage: int, tp_rank: int, copy: int) -> int:
        return tp_rank + self.tp * (copy + self.dp * stage)

    def expert_rank(self, stage: int, ep_rank: int, etp_rank: int, copy: int) -> int:
        return etp_rank + self.etp * (ep_rank + self.ep * (copy + self.expert_copies * stage))


@dataclass(frozen=True, kw_only=True)
class GeneratorLayout:
    """`replicas` servers of `tp` ranks each, of which `ep` groups share the experts."""

    replicas: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.replicas * self.tp


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A Hugging Face tensor, the pipeline stage that holds it and how it is divided.

    `axis` is 0 for rows, 1 for columns, None for a tensor that every rank has whole. `most_parts`
    is the number of kv heads for keys and values, which is as finely as a generator divides them.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    axis: int | None
    stage: int
    expert: int | None = None
    most_parts: int | None = None

    @property
    def length(self) -> int:
        """Rows or columns along the axis; 1 for a tensor that is never divided."""
        return 1 if self.axis is None else self.shape[self.axis]

    @property
    def num_elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class Range:
    """[start, stop) along a tensor's axis; [0, 1) is the whole of an undivided one."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __and__(self, other: Range) -> Range:
        return Range(max(self.start, other.start), min(self.stop, other.stop))


def check_layouts(arch: Architecture, trainer: TrainerLayout, generator: GeneratorLayout) -> None:
    """Raises one LayoutError that lists everything in which the layouts do not fit the model."""
    problems = []
    try:
        check_layout(arch, trainer)
    except LayoutError as error:
        problems.append(str(error))
    tp, kv_heads = generator.tp, arch.num_kv_heads
    rules = [
        (arch.num_heads, tp, "attention heads", "generator tp"),
        (tp, generator.ep, "ranks of a generator", "generator ep"),
    ]
    if arch.experts is None:
        rules.append((arch.ffn_hidden_size, tp, "feed-forward columns", "generator tp"))
    else:
        num, size = arch.experts.num, arch.experts.ffn_hidden_size
        rules += [
            (num, generator.ep, "experts", "generator ep"),
            (size, max(1, tp // generator.ep), "columns of an expert", "generator tp / ep"),
        ]
    problems += [
        f"{key} = {divisor} must divide the {total} {what}"
        for total, divisor, what, key in rules
        if total % divisor
    ]
    if max(tp, kv_heads) % min(tp, kv_heads):
        problems.append(
            f"generator tp = {tp} and the {kv_heads} key/value heads must divide evenly"
        )
    if problems:
        raise LayoutError("; ".join(problems))


def tensors(arch: Architecture, layout: ParallelLayout) -> list[PlacedTensor]:
    """Every tensor that an update carries, stage by stage, and in the order of computation in
    each: the order in which they are gathered and sent."""
    return list(_tensors(arch, layout.pp, layout.vpp))


# A model with many experts has tens of thousands, and a plan asks for them more than once.
@lru_cache(maxsize=2)
def _tensors(arch: Architecture, pp: int, vpp: int) -> tuple[PlacedTensor, ...]:
    layout = ParallelLayout(pp=pp, vpp=vpp)
    placed = [
        tensor
        for param in _exported(arch)
        for tensor in _placed(param, stage_of(param, arch, layout), arch)
    ]
    return tuple(sorted(placed, key=lambda tensor: tensor.stage))  # stable


@lru_cache(maxsize=1)
def _exported(arch: Architecture) -> tuple[Param, ...]:
    return tuple(param for param in parameters(arch).values() if not param.is_copy)


def _placed(param: Param, stage: int, arch: Architecture) -> Iterator[PlacedTensor]:
    match param.split:
        case Split.REPLICATED:
            axis = None
        case Split.COLUMNS:
            axis = 1
        case Split.VOCABULARY | Split.QKV | Split.GATE_UP:
            axis = 0
    for number, (name, shape) in enumerate(zip(param.sources, param.shapes, strict=True)):
        is_key_or_value = param.split is Split.QKV and number > 0
        parts = arch.num_kv_heads if is_key_or_value else None
        yield PlacedTensor(name, shape, param.split, axis, stage, param.expert, parts)


def stage_of(param: Param, arch: Architecture, layout: ParallelLayout) -> int:
    """The pipeline stage that holds `param`: layers are dealt to stages in `vpp` rounds; the ends
    of the model go with their neighbour."""
    if param.name.startswith("decoder.layers."):
        layers_per_chunk = arch.num_layers // (layout.pp * layout.vpp)
        return int(param.name.split(".")[2]) // layers_per_chunk % layout.pp
    return 0 if param.name.startswith("embedding.") else layout.pp - 1


def held(tensor: PlacedTensor, layout: TrainerLayout, part: int) -> Range:
    """What tensor-parallel rank `part` (of `tp`, or of `etp` for an expert) holds."""
    parts = layout.tp if tensor.expert is None else layout.etp
    if tensor.split is Split.VOCABULARY:
        return _part(padded_vocab_size(tensor.length, parts), parts, part) & Range(0, tensor.length)
    return _part(tensor.length, parts, part) if tensor.axis is not None else Range(0, 1)


def needed(
    tensor: PlacedTensor, layout: GeneratorLayout, arch: Architecture, tp_rank: int
) -> Range:
    """What rank `tp_rank` of a generator needs; empty if nothing."""
    parts, part = layout.tp, tp_rank
    if tensor.expert is not None:
        assert arch.experts is not None
        parts = layout.tp // layout.ep
        owner = tensor.expert // (arch.experts.num // layout.ep)
        if tp_rank // parts != owner:
            return Range(0, 0)
        part = tp_rank % parts
    if tensor.axis is None:
        return Range(0, 1)
    if tensor.split is Split.VOCABULARY:
        padded = engine_vocabulary_size(tensor.length, parts)
        return _part(padded, parts, part) & Range(0, tensor.length)
    if tensor.most_parts is not None and tensor.most_parts < parts:
        part = part * tensor.most_parts // parts
        parts = tensor.most_parts
    return _part(tensor.length, parts, part)


def engine_vocabulary_size(vocab_size: int, tp: int) -> int:
    """The rows that a generator gives its vocabulary, over all of its ranks."""
    padded = padded_vocab_size(vocab_size, ENGINE_VOCABULARY_MULTIPLE)
    return padded if padded % tp == 0 else padded_vocab_size(vocab_size, tp * 64)


def _part(length: int, parts: int, part: int) -> Range:
    size = length // parts
    return Range(part * size, (part + 1) * size)
