"""What an update by a plan costs, from the speeds of the links. Pure.

A gather plan is followed in time as `WeightSender` carries it out:

    first bucket  |  pause, begin  |  its call  |  per bucket: wire, load; meanwhile the next is
    gathered and its call waits  |  checksum, stamp, end, resume

A direct plan is bounded by its busiest rank: all that it sends or receives, one transfer after the
other, while packing and loading go on beside it. Its receiver takes one call for the whole update.

Trainer and generators are on nodes of their own, unless all fit into one. GB is 1e9 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import Bucket, Plan, PlanKind

GB = 1e9
CALLS_TO_PAUSE = 2  # pause, begin
CALLS_TO_RESUME = 4  # checksum, stamp, end, resume


class Senders(StrEnum):
    """Who speaks to the generators in a gather plan."""

    ONE = "one rank"  # as `WeightSender` does: other stages hand their buckets to the first
    STAGE_LEADERS = "stage leaders"  # each in its turn: an engine takes one bucket at a time
    HOLDERS = "all holders"  # a direct plan


@dataclass(frozen=True, kw_only=True)
class Links:
    """Speeds that are reached, per GPU or NIC and direction; the defaults are an H100 cluster's.

    `overlap` is 1 where copies and wire do not slow each other down, 0 where they share the same
    cores, as over gloo.
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
    overlap: float = 1.0

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

    def both(self, hidden_s: float, shown_s: float) -> float:
        """Seconds for two things at the same time."""
        together, after = max(hidden_s, shown_s), hidden_s + shown_s
        return self.overlap * together + (1 - self.overlap) * after


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
    resume_s: float
    pause_s: float
    total_s: float
    sent_bytes: int
    received_bytes: int
    gathered_bytes: int
    trainer_extra_bytes: int
    generator_extra_bytes: int


def predict(
    plan: Plan,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
    links: Links,
    senders: Senders = Senders.ONE,
) -> Prediction:
    """The cost of one update; `senders` matters for a gather plan alone."""
    if plan.kind is PlanKind.DIRECT:
        return _predict_direct(plan, trainer, generator, links)
    return _predict_gather(plan, trainer, generator, links, senders)


@dataclass(frozen=True)
class _BucketCost:
    gather_s: float
    convert_s: float
    call_s: float
    wire_s: float
    load_s: float

    @property
    def prepare_s(self) -> float:
        return self.gather_s + self.convert_s


def _predict_gather(
    plan: Plan, trainer: TrainerLayout, generator: GeneratorLayout, links: Links, senders: Senders
) -> Prediction:
    costs = [
        _bucket_cost(plan, bucket, trainer, generator, links, senders) for bucket in plan.buckets
    ]
    # Leaders gather side by side: of a leader's time only its own turns count.
    hidden_per_turn = trainer.pp if senders is Senders.STAGE_LEADERS else 1
    transfer_s = costs[0].call_s
    for cost, following in zip(costs, [*costs[1:], None], strict=True):
        # The next bucket is gathered and announced while this one is received and loaded.
        hidden_s = following.prepare_s / hidden_per_turn + following.call_s if following else 0.0
        transfer_s += links.both(hidden_s, cost.wire_s + cost.load_s)
    call_s = links.calls(generator.replicas)
    resume_s = CALLS_TO_RESUME * call_s
    pause_s = CALLS_TO_PAUSE * call_s + transfer_s + resume_s
    num_bytes = sum(bucket.num_bytes for bucket in plan.buckets)
    largest = max(bucket.num_bytes for bucket in plan.buckets)
    num_leaders = trainer.pp if senders is Senders.STAGE_LEADERS else 1
    return Prediction(
        kind=plan.kind,
        senders=senders,
        num_buckets=len(plan.buckets),
        first_bucket_s=costs[0].prepare_s,
        gather_s=sum(cost.gather_s for cost in costs),
        convert_s=sum(cost.convert_s for cost in costs),
        call_s=sum(cost.call_s for cost in costs),
        wire_s=sum(cost.wire_s for cost in costs),
        load_s=sum(cost.load_s for cost in costs),
        transfer_s=transfer_s,
        resume_s=resume_s,
        pause_s=pause_s,
        total_s=costs[0].prepare_s + pause_s,
        sent_bytes=num_bytes // num_leaders,
        received_bytes=num_bytes,
        gathered_bytes=num_bytes * (trainer.tp - 1) // trainer.tp,
        trainer_extra_bytes=2 * largest,  # one on the wire, the next being filled
        generator_extra_bytes=largest,
    )


def _bucket_cost(
    plan: Plan,
    bucket: Bucket,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
    links: Links,
    senders: Senders,
) -> _BucketCost:
    size = bucket.num_bytes / GB
    tensors = len(bucket.pieces)
    is_expert = plan.tensors[bucket.pieces[0].tensor].expert is not None
    parts = trainer.etp * trainer.ep if is_expert else trainer.tp
    gather_s = 0.0
    if parts > 1:
        gather_s += links.collective_s + size * (parts - 1) / parts / links.span(parts)
    if senders is Senders.ONE and bucket.stage > 0:
        gather_s += links.collective_s + size / links.span(trainer.world_size)
    world_size = trainer.world_size + generator.world_size
    return _BucketCost(
        gather_s=gather_s,
        convert_s=size / links.hbm_copy_gb_s + tensors * links.tensor_s,
        call_s=links.calls(generator.replicas, tensors),
        wire_s=links.collective_s
        + generator.world_size * links.hop_s
        + size / links.span(world_size),
        load_s=size / generator.tp / links.hbm_copy_gb_s + tensors * links.tensor_s,
    )


def _predict_direct(
    plan: Plan, trainer: TrainerLayout, generator: GeneratorLayout, links: Links
) -> Prediction:
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    pieces_out: Counter[int] = Counter()
    pieces_in: Counter[int] = Counter()
    for transfer in plan.transfers:
        bucket = plan.buckets[transfer.bucket]
        sent[transfer.source] += bucket.num_bytes
        sends[transfer.source] += 1
        pieces_out[transfer.source] += len(bucket.pieces)
        for target in transfer.targets:
            received[target] += bucket.num_bytes
            receives[target] += 1
            pieces_in[target] += len(bucket.pieces)
    speed = links.span(trainer.world_size + generator.world_size) * GB
    most_sent, most_received = max(sent.values()), max(received.values())
    wire_s = max(
        _busiest(sent, sends, speed, links.collective_s),
        _busiest(received, receives, speed, links.collective_s),
    )
    hbm = links.hbm_copy_gb_s * GB
    convert_s = _busiest(sent, pieces_out, hbm, links.tensor_s)
    load_s = _busiest(received, pieces_in, hbm, links.tensor_s)
    first_s = convert_s / max(1, max(sends.values()))
    last_s = load_s / max(1, max(receives.values()))
    transfer_s = links.both(links.both(convert_s, load_s), wire_s) + last_s
    call_s = links.calls(generator.replicas)
    resume_s = CALLS_TO_RESUME * call_s
    pause_s = (CALLS_TO_PAUSE + 1) * call_s + transfer_s + resume_s
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
        resume_s=resume_s,
        pause_s=pause_s,
        total_s=first_s + pause_s,
        sent_bytes=most_sent,
        received_bytes=most_received,
        gathered_bytes=0,
        trainer_extra_bytes=2 * largest,
        generator_extra_bytes=2 * largest,
    )


def _busiest(num_bytes: Counter[int], counts: Counter[int], speed: float, each_s: float) -> float:
    return max(num_bytes[rank] / speed + counts[rank] * each_s for rank in num_bytes)


def predict_all(
    plans: Sequence[Plan], trainer: TrainerLayout, generator: GeneratorLayout, links: Links
) -> list[Prediction]:
    """Every plan with every kind of sender that it can have."""
    found = []
    for plan in plans:
        if plan.kind is PlanKind.DIRECT:
            found.append(predict(plan, trainer, generator, links))
            continue
        found.append(predict(plan, trainer, generator, links, Senders.ONE))
        if trainer.pp > 1:
            found.append(predict(plan, trainer, generator, links, Senders.STAGE_LEADERS))
    return found
