"""The cost model: what must hold for any speeds, and what it says of known layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import direct_plan, gather_plan
from megatron_magistral.weights.plan_cost import (
    BucketCost,
    Links,
    Prediction,
    Senders,
    follow,
    predict,
)
from megatron_magistral.weights.presets import PRESETS, find_model, num_parameters, sized
from megatron_magistral.weights.settings import PlanKind

SMALL = PRESETS["magistral-small-24b"]
FREE = Links(collective_s=0, hop_s=0, http_call_s=0, http_each_s=0, http_tensor_s=0, tensor_s=0)


def of(
    kind: PlanKind,
    links: Links,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
) -> Prediction:
    make = gather_plan if kind is PlanKind.GATHER else direct_plan
    return predict(make(SMALL, trainer, generator), links)


def test_without_latencies_a_gathered_update_takes_its_bytes_over_one_nic() -> None:
    links = replace(FREE, nvlink_gb_s=1e6, hbm_copy_gb_s=1e9)
    trainer, generator = TrainerLayout(tp=8), GeneratorLayout(replicas=4, tp=8)
    prediction = of(PlanKind.GATHER, links, trainer, generator)
    expected_s = 2 * num_parameters(SMALL) / (links.nic_gb_s * 1e9)
    assert prediction.total_s == pytest.approx(expected_s, rel=1e-3)
    assert prediction.received_bytes == 2 * num_parameters(SMALL)


def test_a_direct_update_moves_to_each_rank_a_share_of_the_bytes() -> None:
    trainer, generator = TrainerLayout(tp=8), GeneratorLayout(replicas=4, tp=8)
    prediction = of(PlanKind.DIRECT, Links(), trainer, generator)
    share = 2 * num_parameters(SMALL) / 8
    assert share < prediction.received_bytes < 1.001 * share  # norms are everyone's


def test_leaders_that_send_each_part_alone_send_as_much_and_nothing_is_loaded() -> None:
    """Every part of a tensor leaves the same rank; it is received once, not by every rank."""
    plan = gather_plan(SMALL, TrainerLayout(tp=8), GeneratorLayout(replicas=4, tp=8))
    whole, parts = (predict(plan, FREE, delivery) for delivery in PlanKind)
    assert (parts.kind, parts.senders) == (PlanKind.DIRECT, Senders.LEADERS)
    assert parts.sent_bytes == whole.sent_bytes and parts.wire_s == pytest.approx(whole.wire_s)
    assert parts.received_bytes == whole.received_bytes // 8
    assert parts.load_s == 0 < whole.load_s and parts.total_s < whole.total_s
    slow = replace(FREE, collective_s=1e-3)
    assert predict(plan, slow, PlanKind.DIRECT).wire_s > predict(plan, slow).wire_s


def test_in_one_node_the_wire_is_nvlink_or_where_there_is_none_pcie() -> None:
    trainer, generator = TrainerLayout(tp=4), GeneratorLayout(replicas=2, tp=2)
    seconds = {
        speed: of(PlanKind.GATHER, replace(FREE, nvlink_gb_s=speed), trainer, generator).wire_s
        for speed in (0, 360)
    }
    assert seconds[0] / seconds[360] == pytest.approx(360 / FREE.pcie_gb_s)


def test_each_pipeline_stage_sends_its_own_part_and_gathers_beside_the_others() -> None:
    generator = GeneratorLayout(replicas=4, tp=8)
    slow_gather = replace(FREE, nvlink_gb_s=20)
    one, four = (
        of(PlanKind.GATHER, slow_gather, TrainerLayout(tp=8, pp=pp), generator) for pp in (1, 4)
    )
    assert 4 * four.sent_bytes < 1.3 * one.sent_bytes  # the ends of the model are no equal share
    assert four.received_bytes == one.received_bytes
    assert four.wire_s == pytest.approx(one.wire_s)  # an engine takes one bucket at a time
    assert one.transfer_s > one.gather_s * 0.9 > four.transfer_s * 0.9


GATHERED = [BucketCost(gather_s=3, convert_s=1, digest_s=0, call_s=0.5, wire_s=4, load_s=2)] * 3


def test_an_update_that_hides_nothing_takes_the_sum_of_its_parts() -> None:
    times = follow(GATHERED, call_s=0.5, overlap=0.0)
    assert times.total_s == pytest.approx(3 * (3 + 1 + 0.5 + 4 + 2) + 6 * 0.5)
    assert times.pause_s == times.total_s - 4


def test_an_update_that_hides_all_it_can_takes_its_longest_parts() -> None:
    times = follow(GATHERED, call_s=0.0, overlap=1.0)
    assert times.total_s == pytest.approx(4 + 0.5 + 3 * (4 + 2))  # gathering 4, wire 4; load 2


LAYOUTS = {
    "magistral-small-24b": (TrainerLayout(tp=8, dp=4), GeneratorLayout(replicas=4, tp=8)),
    "dense-120b": (TrainerLayout(tp=8, pp=4), GeneratorLayout(replicas=4, tp=8)),
    "moe-700b": (TrainerLayout(tp=8, pp=4, ep=8), GeneratorLayout(tp=32, ep=32)),
}


@pytest.mark.parametrize("kind", PlanKind)
@pytest.mark.parametrize("name", PRESETS)
def test_no_update_is_faster_than_its_bytes_over_the_links(name: str, kind: PlanKind) -> None:
    arch, links = PRESETS[name], Links()
    trainer, generator = LAYOUTS[name]
    make = gather_plan if kind is PlanKind.GATHER else direct_plan
    found = predict(make(arch, trainer, generator), links)
    nic = links.between_nodes() * 1e9
    model_bytes = 2 * num_parameters(arch)
    # Every replica must get the model, over no more links than it has ranks.
    least = model_bytes if kind is PlanKind.GATHER else model_bytes / generator.tp
    assert found.received_bytes >= 0.999 * least
    assert found.wire_s >= max(found.received_bytes, found.sent_bytes) / nic
    assert found.pause_s >= found.wire_s and found.total_s >= found.pause_s
    assert found.load_s >= model_bytes / generator.tp / (links.hbm_copy_gb_s * 1e9) * 0.999


@pytest.mark.parametrize("kind", PlanKind)
def test_a_plan_for_many_replicas_holds_no_more_than_one_for_a_few(kind: PlanKind) -> None:
    make = gather_plan if kind is PlanKind.GATHER else direct_plan
    arch = sized(8)
    few = make(arch, TrainerLayout(tp=2, dp=2), GeneratorLayout(replicas=2, tp=2))
    many = make(arch, TrainerLayout(tp=2, dp=512), GeneratorLayout(replicas=512, tp=2))
    assert many.buckets is few.buckets and many.tensors is few.tensors
    assert predict(many, Links()).received_bytes == predict(few, Links()).received_bytes


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(PlanKind),
    field=st.sampled_from(["nvlink_gb_s", "nic_gb_s", "pcie_gb_s", "hbm_copy_gb_s"]),
    factor=st.floats(1.1, 100),
)
def test_a_faster_link_never_makes_an_update_slower(
    kind: PlanKind, field: str, factor: float
) -> None:
    links = Links()
    faster = replace(links, **{field: getattr(links, field) * factor})
    trainer, generator = TrainerLayout(tp=4, dp=2), GeneratorLayout(replicas=4, tp=2)
    arch = sized(8)
    make = gather_plan if kind is PlanKind.GATHER else direct_plan
    plan = make(arch, trainer, generator, bucket_bytes=1 << 20)
    before, after = (predict(plan, each) for each in (links, faster))
    assert after.total_s <= before.total_s * (1 + 1e-9)
    assert after.pause_s <= after.total_s


@pytest.mark.parametrize(
    ("name", "billions"),
    [("magistral-small-24b", 23.57), ("dense-120b", 122.6), ("moe-700b", 705.9)],
)
def test_a_preset_has_its_size(name: str, billions: float) -> None:
    assert num_parameters(find_model(name)) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("size_mib", [8, 64, 256, 2048])
def test_a_model_of_a_size_has_about_that_size(size_mib: int) -> None:
    assert num_parameters(sized(size_mib)) * 2 / 2**20 == pytest.approx(size_mib, rel=0.25)
