"""The plan `direct` with fake engines over real gloo groups: order, failures, what goes to whom.

What both plans do alike is tested beside the other one (test_transfer.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_magistral.rollout.engine import ControlTimeouts, EngineTimeout, Phase
from megatron_magistral.weights.buffers import TurnBuffers
from megatron_magistral.weights.checksum import ChecksumSettings
from megatron_magistral.weights.delivery import Direct, EngineAddress, pieces
from megatron_magistral.weights.flatten import loosen
from megatron_magistral.weights.parts import View
from megatron_magistral.weights.settings import PlanKind
from megatron_magistral.weights.transfer import UpdateFailed, WeightSender
from tests.rollout.fake_engine import JOIN, RECEIVE, FakeEngine, Fault
from tests.weights.test_transfer import (
    MANIFEST,
    UPDATE_PATHS,
    addresses,
    assert_holds,
    some_buckets,
)

RARELY = ChecksumSettings(sample_stride=1 << 20, full_every=1 << 20)


def make_sender(
    timeouts: ControlTimeouts | None = None, checksums: ChecksumSettings | None = None
) -> WeightSender:
    return WeightSender(
        MANIFEST, backend="gloo", timeouts=timeouts, checksums=checksums, plan=PlanKind.DIRECT
    )


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    with make_sender() as sender:
        yield sender


def test_what_is_received_lands_in_the_memory_of_the_parameters(sender, engines) -> None:
    sender.connect(addresses(engines[:1]))
    sender.send(some_buckets(1.0), 1)
    before = {name: tensor.data_ptr() for name, tensor in engines[0].weights.items()}
    sender.send(some_buckets(2.0), 2)
    assert {name: tensor.data_ptr() for name, tensor in engines[0].weights.items()} == before
    assert_holds(engines[0], 2.0, 2)


def test_the_order_of_an_update_is_that_of_the_plan_gather(sender, engines) -> None:
    sender.connect(addresses(engines))
    before = len(engines[0].calls)
    sender.send(some_buckets(1.0), 1)
    phases = (Phase.PAUSE, Phase.BEGIN, Phase.CHECKSUM, Phase.STAMP, Phase.END, Phase.RESUME)
    opening, closing = phases[:2], phases[2:]
    expected = [*map(UPDATE_PATHS.get, opening), RECEIVE, RECEIVE, *map(UPDATE_PATHS.get, closing)]
    assert engines[0].calls[before:] == expected


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.HANG, Fault.DIE])
@pytest.mark.parametrize("num_sound", [0, 1])
def test_an_engine_that_misses_a_bucket_is_named_and_nobody_serves_partial_weights(
    num_sound: int, fault: Fault, engines: list[FakeEngine]
) -> None:
    bad, good = engines
    timeouts = ControlTimeouts(transfer_s=1.0) if fault is Fault.HANG else None
    with make_sender(timeouts) as sender:
        sender.connect(addresses(engines))
        sender.send(some_buckets(1.0), 1)
        bad.faults[RECEIVE] = fault
        bad.sound_calls[RECEIVE] = bad.calls.count(RECEIVE) + num_sound
        buckets = iter(some_buckets(2.0))
        with pytest.raises(UpdateFailed) as failure:
            sender.send(buckets, 2)
        assert next(buckets, None) is None
        named = {error.engine: error for error in failure.value.errors}
        assert named["engine0"].phase is Phase.TRANSFER
        assert isinstance(named["engine0"], EngineTimeout) == (fault is Fault.HANG)
        assert set(failure.value.quarantined) == {"engine0", "engine1"}
        assert good.paused and good.version == "1"
        if fault is Fault.REFUSE:
            bad.faults.clear()
            sender.connect(addresses(engines))
            sender.send(some_buckets(3.0), 3)
            for engine in engines:
                assert_holds(engine, 3.0, 3)


def test_an_engine_that_does_not_join_is_named_at_connect(engines) -> None:
    engines[1].faults[JOIN] = Fault.REFUSE
    sender = make_sender(ControlTimeouts(join_s=2.0))
    with sender, pytest.raises(UpdateFailed, match="engine engine1: join update group failed"):
        sender.connect(addresses(engines))


def test_engines_that_join_in_the_reverse_order_have_their_own_ranks(sender, engines) -> None:
    engines[0].faults[JOIN] = Fault.DELAY
    sender.connect(addresses(engines))
    sender.send(some_buckets(1.0), 1)
    for engine in engines:
        assert_holds(engine, 1.0, 1)


@pytest.mark.parametrize("num_sound", [0, 1])
def test_a_bucket_that_an_engine_lost_is_found_out_also_outside_the_sample(
    num_sound: int, engines: list[FakeEngine]
) -> None:
    with make_sender(checksums=RARELY) as sender:
        sender.connect(addresses(engines))
        sender.send(some_buckets(1.0), 1)  # the first one checks all
        engines[0].faults[RECEIVE] = Fault.LOSE
        engines[0].sound_calls[RECEIVE] = engines[0].calls.count(RECEIVE) + num_sound
        with pytest.raises(UpdateFailed, match="engine engine0: compare checksums") as failure:
            sender.send(some_buckets(2.0), 2)
        assert failure.value.quarantined == ("engine0",)
        assert engines[0].paused and engines[0].version == "1"
        assert_holds(engines[1], 2.0, 2)


def test_an_engine_whose_loader_fills_one_parameter_from_another_is_refused(
    sender, engines
) -> None:
    engines[1].linked = ["lm_head.weight"]
    with pytest.raises(UpdateFailed, match=r"engine1.*only the plan .* runs: lm_head\.weight"):
        sender.connect(addresses(engines))


def test_engines_that_hold_different_parts_are_refused_together() -> None:
    whole, half = View((4,), (1,), 0), View((2,), (1,), 0)
    delivery = Direct([EngineAddress("http://a:1"), EngineAddress("http://b:1")])
    assert delivery.held({"a": {"w": [[whole]]}}) == {"w": [[whole]]}
    with pytest.raises(ValueError, match="engines a and b hold different parts"):
        delivery.held({"a": {"w": [[whole]]}, "b": {"w": [[half]]}})


# --- what goes to whom --------------------------------------------------------------------------


def test_each_rank_gets_what_it_holds_and_no_more() -> None:
    rows = torch.arange(12, dtype=torch.float32).view(4, 3)
    columns = torch.arange(20, 32, dtype=torch.float32).view(3, 4)
    both = torch.arange(40, 45, dtype=torch.float32)
    held = {
        "rows": [[View.of(rows[:2])], [View((2, 3), (3, 1), 6)]],
        "columns": [[View((3, 2), (4, 1), 0)], [View((3, 2), (4, 1), 2)]],
        "both": [[View((5,), (1,), 0)]] * 2,
    }
    bucket = loosen([("rows", rows), ("columns", columns), ("both", both)])
    sent = [(rank, data.view(torch.float32)) for rank, data in pieces(bucket, held, TurnBuffers(1))]
    assert [rank for rank, _ in sent] == [0, 1]
    for rank, data in sent:
        expected = [rows[2 * rank :][:2], columns[:, 2 * rank :][:, :2], both]
        assert torch.equal(data, torch.cat([part.reshape(-1) for part in expected]))


def test_what_a_rank_holds_whole_is_sent_from_where_it_is() -> None:
    tensors = [("a", torch.rand(700, 400)), ("b", torch.rand(7)), ("c", torch.rand(9))]
    held = {name: [[View.of(tensor)]] for name, tensor in tensors}
    sent = [data for _, data in pieces(loosen(tensors), held, TurnBuffers(1))]
    assert [data.nbytes for data in sent] == [64, 1_120_000]  # the small ones together, first
    assert sent[1].data_ptr() == tensors[0][1].data_ptr()


def test_small_tensors_that_are_neighbours_in_memory_are_not_copied() -> None:
    both = torch.rand(10)
    held = {name: [[View((5,), (1,), 0)]] for name in "ab"}

    def sent(*named: tuple[str, torch.Tensor]) -> torch.Tensor:
        ((_, data),) = pieces(loosen(named), held, TurnBuffers(1))
        return data.view(torch.float32)

    in_order = sent(("a", both[:5]), ("b", both[5:]))
    assert in_order.data_ptr() == both.data_ptr()
    swapped = sent(("a", both[5:]), ("b", both[:5]))
    assert torch.equal(swapped, torch.cat([both[5:], both[:5]]))


def test_an_empty_part_of_a_bucket_is_not_sent() -> None:
    tensor = torch.rand(4)
    held = {"a": [[View.of(tensor)], []]}
    assert [rank for rank, _ in pieces(loosen([("a", tensor)]), held, TurnBuffers(1))] == [0]
