"""Updates of fake engines over a real gloo group: order, content, failures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_magistral.rollout.engine import ControlTimeouts, EngineTimeout, Phase
from megatron_magistral.weights.transfer import EngineAddress, UpdateFailed, WeightSender
from tests.rollout.fake_engine import FakeEngine, Fault

BOUND_OF = {
    Phase.PAUSE: "pause_s",
    Phase.BEGIN: "begin_s",
    Phase.TRANSFER: "transfer_s",
    Phase.STAMP: "end_s",
    Phase.END: "end_s",
    Phase.RESUME: "resume_s",
}
UPDATE_PATHS = {
    Phase.PAUSE: "/pause_generation",
    Phase.BEGIN: "/begin_weight_update",
    Phase.TRANSFER: "/update_weights_from_distributed",
    Phase.STAMP: "/update_weight_version",
    Phase.END: "/end_weight_update",
    Phase.RESUME: "/continue_generation",
}


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    made = [FakeEngine(), FakeEngine()]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    with WeightSender(backend="gloo") as sender:
        yield sender


def addresses(engines: list[FakeEngine]) -> list[EngineAddress]:
    return [EngineAddress(engine.url, name=f"engine{i}") for i, engine in enumerate(engines)]


def some_buckets(fill: float) -> list[list[tuple[str, Tensor]]]:
    return [
        [("a", torch.full((3, 5), fill, dtype=torch.bfloat16)), ("b", torch.full((7,), fill))],
        [("c", torch.full((2, 2, 2), fill))],
    ]


def assert_holds(engine: FakeEngine, fill: float, version: int) -> None:
    assert engine.version == str(version)
    assert not engine.paused and not engine.session_open
    expected = {name: tensor for bucket in some_buckets(fill) for name, tensor in bucket}
    assert set(engine.weights) == set(expected)
    for name, tensor in expected.items():
        assert engine.weights[name].dtype == tensor.dtype
        assert torch.equal(engine.weights[name], tensor)


def test_every_engine_gets_every_tensor_bit_for_bit(sender, engines) -> None:
    sender.connect(addresses(engines))
    for version in (1, 2, 3):
        timings = sender.send(some_buckets(version / 3), version)
        for engine in engines:
            assert_holds(engine, version / 3, version)
    assert timings.num_buckets == 2 and timings.num_bytes == 15 * 2 + 7 * 4 + 8 * 4


def test_the_first_bucket_is_prepared_before_the_pause_and_the_version_set_after_the_last(
    sender, engines
) -> None:
    sender.connect(addresses(engines))
    engine = engines[0]
    before = len(engine.calls)
    seen_at_first_bucket = []

    def buckets():
        seen_at_first_bucket.extend(engine.calls[before:])
        yield from some_buckets(1.0)

    sender.send(buckets(), 1)
    assert seen_at_first_bucket == []
    load = UPDATE_PATHS[Phase.TRANSFER]
    order = [UPDATE_PATHS[phase] for phase in (Phase.PAUSE, Phase.BEGIN)]
    order += [load, load]
    order += [UPDATE_PATHS[phase] for phase in (Phase.STAMP, Phase.END, Phase.RESUME)]
    assert engine.calls[before:] == order


def test_tensors_are_converted_to_the_dtype_of_the_engines(engines) -> None:
    with WeightSender(backend="gloo", dtype=torch.bfloat16) as sender:
        sender.connect(addresses(engines))
        weight = torch.linspace(-1, 1, 12).view(3, 4)
        sender.send([[("w", weight.t())]], 1)
    assert torch.equal(engines[1].weights["w"], weight.t().to(torch.bfloat16))


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("phase", UPDATE_PATHS)
def test_an_engine_that_misses_a_phase_is_named_and_never_serves_partial_weights(
    phase: Phase, fault: Fault, engines
) -> None:
    bad, good = engines
    timeouts = ControlTimeouts(**{BOUND_OF[phase]: 1.0}) if fault is Fault.HANG else None
    with WeightSender(backend="gloo", timeouts=timeouts) as sender:
        sender.connect(addresses(engines))
        sender.send(some_buckets(1.0), 1)
        bad.faults[UPDATE_PATHS[phase]] = fault
        buckets = iter(some_buckets(2.0))
        with pytest.raises(UpdateFailed) as failure:
            sender.send(buckets, 2)
    assert next(buckets, None) is None  # no trainer rank is left waiting in a gather
    named = {error.engine: error for error in failure.value.errors}
    assert named["engine0"].phase is phase
    assert isinstance(named["engine0"], EngineTimeout) == (fault is Fault.HANG)
    if phase is Phase.TRANSFER:
        assert set(failure.value.quarantined) == {"engine0", "engine1"}
        assert good.paused and good.version == "1"
    else:
        assert failure.value.quarantined == ("engine0",)
        untouched = phase in (Phase.PAUSE, Phase.BEGIN)
        assert_holds(good, *((1.0, 1) if untouched else (2.0, 2)))


def test_engines_of_a_broken_transfer_are_whole_again_after_a_full_update(sender, engines) -> None:
    bad, good = engines
    sender.connect(addresses(engines))
    bad.faults[UPDATE_PATHS[Phase.TRANSFER]] = Fault.REFUSE
    with pytest.raises(UpdateFailed):
        sender.send(some_buckets(1.0), 1)
    assert good.paused and good.session_open
    with pytest.raises(RuntimeError, match="connect"):
        sender.send(some_buckets(1.0), 1)
    bad.faults.clear()
    sender.connect(addresses(engines))
    sender.send(some_buckets(2.0), 2)
    for engine in engines:
        assert_holds(engine, 2.0, 2)


def test_an_engine_may_leave_and_another_join_between_updates(sender, engines) -> None:
    sender.connect(addresses(engines[:1]))
    sender.send(some_buckets(1.0), 1)
    sender.connect(addresses(engines))
    sender.send(some_buckets(2.0), 2)
    sender.connect(addresses(engines[1:]))
    sender.send(some_buckets(3.0), 3)
    assert_holds(engines[0], 2.0, 2)
    assert_holds(engines[1], 3.0, 3)


def test_an_engine_that_is_not_there_is_named_at_connect(sender, engines) -> None:
    engines[1].close()
    with pytest.raises(UpdateFailed, match="engine engine1: server info failed"):
        sender.connect(addresses(engines))


def test_an_engine_that_does_not_join_is_named_at_connect(engines) -> None:
    engines[1].faults["/init_weights_update_group"] = Fault.REFUSE
    sender = WeightSender(backend="gloo", timeouts=ControlTimeouts(join_s=2.0))
    with sender, pytest.raises(UpdateFailed, match="engine engine1: join update group failed"):
        sender.connect(addresses(engines))


def test_an_engine_whose_overlap_scheduler_lacks_the_plugin_is_refused(sender, engines) -> None:
    engines[0].info = {"disable_overlap_schedule": False, "internal_states": [{}]}
    with pytest.raises(UpdateFailed, match="plugin is not active"):
        sender.connect(addresses(engines))


def test_an_update_without_buckets_is_refused_before_the_pause(sender, engines) -> None:
    sender.connect(addresses(engines))
    with pytest.raises(ValueError, match="no buckets"):
        sender.send([], 1)
    assert "/pause_generation" not in engines[0].calls
