"""The cost model: what must hold for any speeds, and what it says of known layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout
from megatron_magistral.weights.plan import PlanKind, direct_plan, gather_plan
from megatron_magistral.weights.plan_cost import Links, Prediction, Senders, predict, predict_all
from megatron_magistral.weights.presets import PRESETS, find_model, num_parameters, sized

SMALL = PRESETS["magistral-small-24b"]
FREE = Links(collective_s=0, hop_s=0, http_call_s=0, http_each_s=0, http_tensor_s=0, tensor_s=0)


def of(
    kind: PlanKind,
    links: Links,
    trainer: TrainerLayout,
    generator: GeneratorLayout,
    senders: Senders = Senders.ONE,
) -> Prediction:
    make = gather_plan if kind is PlanKind.GATHER else direct_plan
    return predict(make(SMALL, trainer, generator), trainer, generator, links, senders)


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


def test_in_one_node_the_wire_is_nvlink_or_where_there_is_none_pcie() -> None:
    trainer, generator = TrainerLayout(tp=4), GeneratorLayout(replicas=2, tp=2)
    seconds = {
        speed: of(PlanKind.GATHER, replace(FREE, nvlink_gb_s=speed), trainer, generator).wire_s
        for speed in (0, 360)
    }
    assert seconds[0] / seconds[360] == pytest.approx(360 / FREE.pcie_gb_s)


def test_stage_leaders_spare_the_hop_to_the_first_stage() -> None:
    trainer, generator = TrainerLayout(tp=8, pp=4), GeneratorLayout(replicas=4, tp=8)
    one = of(PlanKind.GATHER, Links(), trainer, generator, Senders.ONE)
    leaders = of(PlanKind.GATHER, Links(), trainer, generator, Senders.STAGE_LEADERS)
    assert leaders.gather_s < one.gather_s and leaders.total_s < one.total_s
    assert leaders.wire_s == one.wire_s  # an engine takes one bucket at a time


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(PlanKind),
    field=st.sampled_from(["nvlink_gb_s", "nic_gb_s", "pcie_gb_s", "hbm_copy_gb_s"]),
    factor=st.floats(1.1, 100),
    overlap=st.floats(0, 1),
)
def test_a_faster_link_never_makes_an_update_slower(
    kind: PlanKind, field: str, factor: float, overlap: float
) -> None:
    links = Links(overlap=overlap)
    faster = replace(links, **{field: getattr(links, field) * factor})
    trainer, generator = TrainerLayout(tp=4, dp=2), GeneratorLayout(replicas=4, tp=2)
    arch = sized(8)
    make = gather_plan if kind is PlanKind.GATHER else direct_plan
    plan = make(arch, trainer, generator, bucket_bytes=1 << 20)
    before, after = (predict(plan, trainer, generator, each) for each in (links, faster))
    assert after.total_s <= before.total_s * (1 + 1e-9)
    assert after.pause_s <= after.total_s


def test_every_plan_is_predicted_with_every_sender_that_it_can_have() -> None:
    trainer, generator = TrainerLayout(tp=2, pp=2), GeneratorLayout(tp=2)
    plans = [make(sized(8), trainer, generator) for make in (gather_plan, direct_plan)]
    found = predict_all(plans, trainer, generator, Links())
    assert [p.senders for p in found] == list(Senders)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("magistral-small-24b", 23.57), ("dense-120b", 122.6), ("moe-700b", 705.9)],
)
def test_a_preset_has_its_size(name: str, billions: float) -> None:
    assert num_parameters(find_model(name)) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("size_mib", [8, 64, 256, 2048])
def test_a_model_of_a_size_has_about_that_size(size_mib: int) -> None:
    assert num_parameters(sized(size_mib)) * 2 / 2**20 == pytest.approx(size_mib, rel=0.25)
