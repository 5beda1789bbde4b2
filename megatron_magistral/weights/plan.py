"""What an update of the weights sends, from whom to whom, in which buckets. Pure.

Two ways from a trainer's shards to a generator's:

    gather   full tensors, put together by the stage that holds them, to every generator rank;
             each keeps its part: what unmodified SGLang understands
    direct   each generator rank receives its own part and nothing else, from the ranks that hold
             it: needs a receiver inside the engine that puts pieces into place

A plan is a function of its arguments alone, so every rank that computes it has the same one, in
the same order. Every piece is in one bucket; a bucket is larger than `bucket_bytes` only if it is
one piece that is.

Replicas are alike, and so are data-parallel copies: buckets depend on neither number. Who sends
which bucket to which ranks is a rule (`Plan.routes`), so that a plan for thousands of GPUs is no
larger than one for eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import groupby
from typing import TypeVar

from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.placement import (
    GeneratorLayout,
    PlacedTensor,
    Range,
    TrainerLayout,
    check_layouts,
    held,
    needed,
    tensors,
)
from megatron_magistral.weights.settings import PlanKind

DEFAULT_BUCKET_BYTES = 512 << 20
_SCRATCH_SHARE = 16

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Piece:
    """The part `range` of tensor number `tensor` of a plan."""

    tensor: int
    range: Range


@dataclass(frozen=True, order=True, slots=True)
class Stream:
    """What the holders of one shard send to the same ranks `tp_ranks` of every replica."""

    stage: int
    is_expert: bool
    ep_rank: int
    part: int
    tp_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces that travel together, in this order, without padding."""

    stream: Stream
    pieces: tuple[Piece, ...]
    num_bytes: int

    @property
    def stage(self) -> int:
        return self.stream.stage


@dataclass(frozen=True, slots=True)
class Transfer:
    """Trainer rank `source` sends bucket number `bucket` to the generator ranks `targets`. Both
    are numbered from 0 on their own side."""

    bucket: int
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """An update. Transfers of one source, and those to one target, happen in the order given."""

    kind: PlanKind
    trainer: TrainerLayout
    generator: GeneratorLayout
    tensors: tuple[PlacedTensor, ...]
    buckets: tuple[Bucket, ...]

    def num_sources(self, stream: Stream) -> int:
        """How many ranks share the work of sending a bucket of `stream`."""
        if self.kind is PlanKind.GATHER:
            return 1
        return min(self._copies(stream), self.generator.replicas)

    def source(self, stream: Stream, replica: int) -> int:
        """The trainer rank from which a replica gets `stream`: the replicas are dealt to the copies
        of the shard. Replicas 0, 1, ... `num_sources` - 1 have different ones."""
        if self.kind is PlanKind.GATHER:
            return self.trainer.dense_rank(stream.stage, 0, 0)
        copies, replicas = self._copies(stream), self.generator.replicas
        copy = replica * copies // replicas if copies > replicas else replica % copies
        if stream.is_expert:
            return self.trainer.expert_rank(stream.stage, stream.ep_rank, stream.part, copy)
        return self.trainer.dense_rank(stream.stage, stream.part, copy)

    def routes(self, stream: Stream) -> list[tuple[int, tuple[int, ...]]]:
        """(source, targets) of every transfer of a bucket of `stream`."""
        targets: dict[int, list[int]] = {}
        for replica in range(self.generator.replicas):
            first = replica * self.generator.tp
            served = targets.setdefault(self.source(stream, replica), [])
            served.extend(first + tp_rank for tp_rank in stream.tp_ranks)
        return [(source, tuple(ranks)) for source, ranks in targets.items()]

    def transfers(self) -> Iterator[Transfer]:
        """Every transfer, one by one."""
        routes = {bucket.stream: self.routes(bucket.stream) for bucket in self.buckets}
        for number, bucket in enumerate(self.buckets):
            for source, targets in routes[bucket.stream]:
                yield Transfer(number, source, targets)

    def _copies(self, stream: Stream) -> int:
        return self.trainer.expert_copies if stream.is_expert else self.trainer.dense_copies


def cut(
    items: Sequence[Item], num_bytes: Callable[[Item], int], bucket_bytes: int
) -> Iterator[list[Item]]:
    """Consecutive items in buckets of at most `bucket_bytes`; an item that is larger is alone."""
    bucket: list[Item] = []
    filled = 0
    for item in items:
        size = num_bytes(item)
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    if bucket:
        yield bucket


def filled_bytes(bucket_bytes: int) -> int:
    """How far a gathered bucket is filled. What arrives for it from tensor-parallel ranks takes
    memory, too, and so do digests and calls: with two buckets that is no more than two whole
    ones."""
    return bucket_bytes - scratch_bytes(bucket_bytes)


def scratch_bytes(bucket_bytes: int) -> int:
    return bucket_bytes // _SCRATCH_SHARE


def gather_plan(
    arch: Architecture,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    itemsize: int = 2,
) -> Plan:
    """Every bucket from the first rank of its stage to all generator ranks.

    `itemsize` is that of the dtype on the wire, in bytes. Raises LayoutError.
    """
    check_layouts(arch, trainer, generator)
    placed, buckets = _gather_buckets(
        arch, replace(trainer, dp=1), replace(generator, replicas=1), bucket_bytes, itemsize
    )
    return Plan(PlanKind.GATHER, trainer, generator, placed, buckets)


def direct_plan(
    arch: Architecture,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    itemsize: int = 2,
) -> Plan:
    """Every generator rank its own parts, each from one of the trainer ranks that hold it.

    Data-parallel copies share the work: with as many copies as replicas each serves one replica,
    with fewer each serves several at once. Raises LayoutError.
    """
    check_layouts(arch, trainer, generator)
    placed, buckets = _direct_buckets(
        arch, replace(trainer, dp=1), replace(generator, replicas=1), bucket_bytes, itemsize
    )
    return Plan(PlanKind.DIRECT, trainer, generator, placed, buckets)


PLANS: dict[PlanKind, Callable[..., Plan]] = {
    PlanKind.GATHER: gather_plan,
    PlanKind.DIRECT: direct_plan,
}

# What is sent, for one copy of the trainer's shards and one replica: (tensors, buckets).
_Content = tuple[tuple[PlacedTensor, ...], tuple[Bucket, ...]]


@lru_cache(maxsize=4)
def _gather_buckets(
    arch: Architecture,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
    bucket_bytes: int,
    itemsize: int,
) -> _Content:
    placed = tuple(tensors(arch, trainer))
    size = _sizes(placed, itemsize)
    filled = filled_bytes(bucket_bytes)
    everyone = tuple(range(generator.tp))
    buckets: list[Bucket] = []
    for stage, numbered in groupby(enumerate(placed), key=lambda item: item[1].stage):
        stream = Stream(stage, is_expert=False, ep_rank=0, part=0, tp_ranks=everyone)
        whole = [Piece(number, Range(0, tensor.length)) for number, tensor in numbered]
        buckets += _filled(stream, whole, size, filled)
    return placed, tuple(buckets)


@lru_cache(maxsize=4)
def _direct_buckets(
    arch: Architecture,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
    bucket_bytes: int,
    itemsize: int,
) -> _Content:
    placed = tuple(tensors(arch, trainer))
    size = _sizes(placed, itemsize)
    buckets: list[Bucket] = []
    for stream, pieces in sorted(_streams(placed, arch, trainer, generator).items()):
        buckets += _filled(stream, pieces, size, bucket_bytes)
    return placed, tuple(buckets)


def _filled(
    stream: Stream, pieces: Sequence[Piece], size: Callable[[Piece], int], bucket_bytes: int
) -> Iterator[Bucket]:
    for group in cut(pieces, size, bucket_bytes):
        yield Bucket(stream, tuple(group), sum(map(size, group)))


def _streams(
    placed: Sequence[PlacedTensor],
    arch: Architecture,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
) -> dict[Stream, list[Piece]]:
    @cache
    def cuts(like: PlacedTensor) -> list[tuple[int, tuple[int, ...], Range]]:
        return _cuts(like, arch, trainer, generator)

    streams: dict[Stream, list[Piece]] = {}
    for number, tensor in enumerate(placed):
        is_expert = tensor.expert is not None
        ep_rank = 0
        if tensor.expert is not None:
            assert arch.experts is not None
            ep_rank = tensor.expert // (arch.experts.num // trainer.ep)
        for part, tp_ranks, piece in cuts(_anonymous(tensor, arch, generator)):
            stream = Stream(tensor.stage, is_expert, ep_rank, part, tp_ranks)
            streams.setdefault(stream, []).append(Piece(number, piece))
    return streams


def _anonymous(
    tensor: PlacedTensor, arch: Architecture, generator: GeneratorLayout
) -> PlacedTensor:
    """A stand-in for all tensors that are divided like this one: what `_cuts` depends on."""
    expert = tensor.expert
    if expert is not None and arch.experts is not None:
        per_rank = arch.experts.num // generator.ep
        expert = expert // per_rank * per_rank
    return PlacedTensor("", tensor.shape, tensor.split, tensor.axis, 0, expert, tensor.most_parts)


def _cuts(
    tensor: PlacedTensor, arch: Architecture, trainer: TrainerLayout, generator: GeneratorLayout
) -> list[tuple[int, tuple[int, ...], Range]]:
    """(trainer part, the ranks of a generator that need it, what of it) for one tensor."""
    ranks_of: dict[Range, list[int]] = {}
    for tp_rank in range(generator.tp):
        ranks_of.setdefault(needed(tensor, generator, arch, tp_rank), []).append(tp_rank)
    parts = trainer.tp if tensor.expert is None else trainer.etp
    holders = range(parts if tensor.axis is not None else 1)  # of a whole tensor: any, so the first
    return [
        (part, tuple(tp_ranks), overlap)
        for wanted, tp_ranks in ranks_of.items()
        for part in holders
        if len(overlap := held(tensor, trainer, part) & wanted)
    ]


def _sizes(placed: Sequence[PlacedTensor], itemsize: int) -> Callable[[Piece], int]:
    """The bytes of a piece of `placed` on the wire."""

    def size(piece: Piece) -> int:
        tensor = placed[piece.tensor]
        return tensor.num_elements // tensor.length * len(piece.range) * itemsize

    return size
