"""What an update by a plan costs, from the speeds of the links. Pure.

A gather plan is followed in time (`follow`) as `WeightSender` carries it out, with a sender on the
first rank of each pipeline stage:

    first bucket  |  pause, begin  |  its call  |  per bucket: wire, meanwhile its digests are taken
    and the next is gathered; load, meanwhile the next is announced  |  checksum  |  stamp, end,
    resume

Delivered `direct`, the same senders bring each part to the ranks that hold it: more operations and
no loading. A direct plan has every rank send what it holds, which is not built; it is bounded by
its busiest rank: all that this sends or receives, one transfer after the other, while packing and
loading go on beside it. Its receiver takes one call for the whole update.

Trainer and generators are on nodes of their own, unless all fit into one. GB is 1e9 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_magistral.weights.checksum import ChecksumSettings
from megatron_magistral.weights.parts import LARGE_BYTES
from megatron_magistral.weights.plan import Bucket, Plan, Stream
from megatron_magistral.weights.settings import PlanKind

GB = 1e9
CALLS_TO_PAUSE = 2  # pause, begin
CALLS_TO_RESUME = 3  # stamp, end, resume


@dataclass(frozen=True, kw_only=True)
class Links:
    """Speeds that are reached, per GPU or NIC and direction; the defaults are an H100 cluster's.

    Copies and wire do not slow each other down.
    """

    gpus_per_node: int = 8
    nics_per_node: int = 8
    # NVLink 4: 900 GB/s per GPU, both directions together (H100 data sheet); 80 % of one.
    nvlink_gb_s: float = 360.0
    # ConnectX-7, 400 Gb/s = 50 GB/s (data sheet); 90 % of it.
    nic_gb_s: float = 45.0
    # PCIe 5.0 x16: 63 GB/s after 128b/130b encoding, less packet headers. Caps a NIC, and is the
    # link within a node where there is no NVLink.
    pcie_gb_s: float = 55.0
    # HBM3 of an H100 SXM: 3350 GB/s (data sheet). A copy reads and writes: half; 80 % of that.
    hbm_copy_gb_s: float = 1340.0
    # Assumed, of the order of what nccl-tests show for small messages between nodes.
    collective_s: float = 50e-6
    # Assumed: what each further rank adds to the time that a ring needs to fill.
    hop_s: float = 5e-6
    # Assumed: one control call to an SGLang server and back, through its scheduler.
    http_call_s: float = 3e-3
    # Measured on one core of an AMD EPYC: the sender's own work for a call, and for a tensor named
    # in it. Calls to many engines queue for that core.
    http_each_s: float = 0.29e-3
    http_tensor_s: float = 0.4e-6
    # Assumed: what Python and a kernel launch cost for each tensor that is loaded or laid out.
    tensor_s: float = 30e-6

    def within_node(self) -> float:
        return self.nvlink_gb_s or self.pcie_gb_s

    def between_nodes(self) -> float:
        """Of one GPU's NIC."""
        return min(self.nic_gb_s * self.nics_per_node / self.gpus_per_node, self.pcie_gb_s)

    def span(self, num_ranks: int) -> float:
        """Bytes a second (in GB) within a group of neighbouring ranks."""
        return self.within_node() if num_ranks <= self.gpus_per_node else self.between_nodes()

    def calls(self, num_engines: int, num_tensors: int = 0) -> float:
        """Seconds for the same call on every engine, at once."""
        each_s = self.http_each_s + num_tensors * self.http_tensor_s
        return self.http_call_s + num_engines * each_s


class Senders(StrEnum):
    """Whose links carry an update."""

    LEADERS = "leaders"  # the first rank of each pipeline stage
    HOLDERS = "holders"  # every rank that holds a part of it


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds, and bytes of the busiest rank.

    `gather_s` and `convert_s` are sums over buckets, mostly hidden behind the wire; `call_s`,
    `wire_s` and `load_s` are within `transfer_s`. `pause_s` is all that generation feels; `total_s`
    adds the first bucket.
    """

    kind: PlanKind
    senders: Senders
    num_buckets: int
    first_bucket_s: float
    gather_s: float
    convert_s: float
    call_s: float
    wire_s: float
    load_s: float
    transfer_s: float
    checksum_s: float
    resume_s: float
    pause_s: float
    total_s: float
    sent_bytes: int
    received_bytes: int
    gathered_bytes: int
    trainer_extra_bytes: int
    generator_extra_bytes: int


def predict(plan: Plan, links: Links, delivery: PlanKind | None = None) -> Prediction:
    """The cost of one update. `delivery` is how leaders bring the buckets of a gather plan to
    engines: whole (`gather`, the default), or each part alone (`direct`)."""
    if plan.kind is PlanKind.DIRECT:
        return _predict_direct(plan, links)
    return _predict_gather(plan, links, delivery or plan.kind)


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """Seconds that a bucket takes in each place, were it alone there."""

    gather_s: float
    convert_s: float
    digest_s: float
    call_s: float
    wire_s: float
    load_s: float

    @property
    def prepare_s(self) -> float:
        return self.gather_s + self.convert_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Seconds of an update, one part after the other."""

    first_bucket_s: float
    pausing_s: float
    transfer_s: float
    checksum_s: float
    resume_s: float

    @property
    def pause_s(self) -> float:
        return self.pausing_s + self.transfer_s + self.checksum_s + self.resume_s

    @property
    def total_s(self) -> float:
        return self.first_bucket_s + self.pause_s


def follow(
    costs: Sequence[BucketCost],
    *,
    call_s: float,
    setup_s: float = 0.0,
    overlap: float = 1.0,
    num_leaders: int = 1,
) -> Timeline:
    """A gathered update in time. `call_s` is that of a control call to all engines, `setup_s` what
    gathering takes before its first bucket.

    `overlap` is how much of the shorter of two things is hidden behind the longer one: 1 where they
    use different hardware, 0 where they share a core. `num_leaders` gather side by side and take
    turns on the wire.
    """
    transfer_s = costs[0].call_s
    for cost, following in zip(costs, [*costs[1:], None], strict=True):
        work_s = cost.digest_s + (following.prepare_s if following else 0.0)
        next_call_s = following.call_s if following else 0.0
        # Of a leader's time only its own turns count.
        together_s = max(work_s / num_leaders, cost.wire_s) + max(next_call_s, cost.load_s)
        apart_s = work_s + cost.wire_s + next_call_s + cost.load_s
        transfer_s += overlap * together_s + (1 - overlap) * apart_s
    return Timeline(
        first_bucket_s=setup_s + costs[0].prepare_s,
        pausing_s=CALLS_TO_PAUSE * call_s,
        transfer_s=transfer_s,
        # Engines read back what the sender took the digests of.
        checksum_s=call_s + sum(cost.digest_s for cost in costs),
        resume_s=CALLS_TO_RESUME * call_s,
    )


def _predict_gather(plan: Plan, links: Links, delivery: PlanKind) -> Prediction:
    trainer, is_direct = plan.trainer, delivery is PlanKind.DIRECT
    costs = [_bucket_cost(plan, bucket, links, delivery) for bucket in plan.buckets]
    call_s = links.calls(plan.generator.replicas)
    times = follow(costs, call_s=call_s, num_leaders=trainer.pp)
    of_stage: defaultdict[int, int] = defaultdict(int)
    for bucket in plan.buckets:
        of_stage[bucket.stage] += bucket.num_bytes
    buffered = largest = max(bucket.num_bytes for bucket in plan.buckets)
    if is_direct:  # the rest comes to where it belongs
        buffered = int(max(packed_bytes(plan, bucket)[1] for bucket in plan.buckets))
    num_shares = plan.generator.tp if is_direct else 1
    return Prediction(
        kind=delivery,
        senders=Senders.LEADERS,
        num_buckets=len(plan.buckets),
        first_bucket_s=times.first_bucket_s,
        gather_s=sum(cost.gather_s for cost in costs),
        convert_s=sum(cost.convert_s for cost in costs),
        call_s=sum(cost.call_s for cost in costs),
        wire_s=sum(cost.wire_s for cost in costs),
        load_s=sum(cost.load_s for cost in costs),
        transfer_s=times.transfer_s,
        checksum_s=times.checksum_s,
        resume_s=times.resume_s,
        pause_s=times.pause_s,
        total_s=times.total_s,
        sent_bytes=max(of_stage.values()),
        received_bytes=sum(of_stage.values()) // num_shares,
        gathered_bytes=max(of_stage.values()) * (trainer.tp - 1) // trainer.tp,
        trainer_extra_bytes=_trainer_buffers(plan, delivery) * largest,
        generator_extra_bytes=buffered,
    )


def _trainer_buffers(plan: Plan, delivery: PlanKind) -> int:
    """How many buckets of memory the leader of a stage needs, at most."""
    if delivery is PlanKind.GATHER:
        return 2  # one on the wire, the next being filled
    # What it holds whole it sends from where it is; parts of columns it packs.
    return (2 if plan.trainer.tp > 1 else 1) + (1 if plan.generator.tp > 1 else 0)


def packed_bytes(plan: Plan, bucket: Bucket) -> tuple[float, float]:
    """(bytes that the sender packs, bytes that one engine rank takes out of what was packed), under
    the plan `direct`: small parts are packed together, and columns are not one run anywhere."""
    tp = plan.generator.tp
    packed = unpacked = 0.0
    tensors = [plan.tensors[piece.tensor] for piece in bucket.pieces]
    itemsize = bucket.num_bytes / sum(tensor.num_elements for tensor in tensors)
    for tensor in tensors:
        num_bytes = tensor.num_elements * itemsize
        part = num_bytes if tensor.axis is None else num_bytes / tp
        is_small = part < LARGE_BYTES
        if is_small or (tensor.axis == 1 and tp > 1):
            packed += part * tp
        if is_small:
            unpacked += part
    return packed, unpacked


def _bucket_cost(plan: Plan, bucket: Bucket, links: Links, delivery: PlanKind) -> BucketCost:
    trainer, generator = plan.trainer, plan.generator
    size = bucket.num_bytes / GB
    tensors = len(bucket.pieces)
    is_expert = plan.tensors[bucket.pieces[0].tensor].expert is not None
    parts = trainer.etp * trainer.ep if is_expert else trainer.tp
    gather_s = 0.0
    if parts > 1:
        gather_s += links.collective_s + size * (parts - 1) / parts / links.span(parts)
    load_s = size / generator.tp / links.hbm_copy_gb_s + tensors * links.tensor_s
    num_operations, num_receivers = 1, generator.world_size
    if delivery is PlanKind.DIRECT:
        # To each rank number by itself; operations follow each other without a pause.
        num_holders = generator.tp // generator.ep if is_expert else generator.tp
        num_operations, num_receivers = tensors * num_holders, generator.replicas
        load_s = 0.0
    world_size = trainer.world_size + generator.world_size
    return BucketCost(
        gather_s=gather_s,
        convert_s=size / links.hbm_copy_gb_s + tensors * links.tensor_s,
        digest_s=size / ChecksumSettings().sample_stride / links.hbm_copy_gb_s,
        call_s=links.calls(generator.replicas, tensors),
        wire_s=num_operations * links.collective_s
        + num_receivers * links.hop_s
        + size / links.span(world_size),
        load_s=load_s,
    )


@dataclass
class _Traffic:
    """What one rank sends, or receives."""

    num_bytes: int = 0
    num_transfers: int = 0
    num_pieces: int = 0

    def add(self, other: _Traffic) -> None:
        self.num_bytes += other.num_bytes
        self.num_transfers += other.num_transfers
        self.num_pieces += other.num_pieces


def _predict_direct(plan: Plan, links: Links) -> Prediction:
    sent, received = _direct_traffic(plan)
    hbm = links.hbm_copy_gb_s * GB
    speed = links.span(plan.trainer.world_size + plan.generator.world_size) * GB
    wire_s = max(
        traffic.num_bytes / speed + traffic.num_transfers * links.collective_s
        for traffic in (*sent, *received)
    )
    convert_s, load_s = (
        max(side.num_bytes / hbm + side.num_pieces * links.tensor_s for side in traffic)
        for traffic in (sent, received)
    )
    first_s = convert_s / max(side.num_transfers for side in sent)
    last_s = load_s / max(side.num_transfers for side in received)
    transfer_s = max(convert_s, load_s, wire_s) + last_s
    call_s = links.calls(plan.generator.replicas)
    resume_s = CALLS_TO_RESUME * call_s
    received_bytes = max(side.num_bytes for side in received)
    checksum_s = call_s + received_bytes / ChecksumSettings().sample_stride / hbm
    pause_s = (CALLS_TO_PAUSE + 1) * call_s + transfer_s + checksum_s + resume_s
    largest = max(bucket.num_bytes for bucket in plan.buckets)
    return Prediction(
        kind=plan.kind,
        senders=Senders.HOLDERS,
        num_buckets=len(plan.buckets),
        first_bucket_s=first_s,
        gather_s=0.0,
        convert_s=convert_s,
        call_s=call_s,
        wire_s=wire_s,
        load_s=load_s,
        transfer_s=transfer_s,
        checksum_s=checksum_s,
        resume_s=resume_s,
        pause_s=pause_s,
        total_s=first_s + pause_s,
        sent_bytes=max(side.num_bytes for side in sent),
        received_bytes=received_bytes,
        gathered_bytes=0,
        trainer_extra_bytes=2 * largest,
        generator_extra_bytes=2 * largest,
    )


def _direct_traffic(plan: Plan) -> tuple[list[_Traffic], list[_Traffic]]:
    """Of every trainer rank that sends, and of the ranks of one replica: all receive alike."""
    of_stream: defaultdict[Stream, _Traffic] = defaultdict(_Traffic)
    for bucket in plan.buckets:
        of_stream[bucket.stream].add(_Traffic(bucket.num_bytes, 1, len(bucket.pieces)))
    sent: defaultdict[int, _Traffic] = defaultdict(_Traffic)
    received: defaultdict[int, _Traffic] = defaultdict(_Traffic)
    for stream, traffic in of_stream.items():
        for replica in range(plan.num_sources(stream)):
            sent[plan.source(stream, replica)].add(traffic)
        for tp_rank in stream.tp_ranks:
            received[tp_rank].add(traffic)
    return list(sent.values()), list(received.values())
