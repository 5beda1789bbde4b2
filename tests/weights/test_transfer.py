"""Updates of fake engines over a real gloo group: order, content, failures."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_magistral.rollout.engine import ControlTimeouts, EngineTimeout, Phase, TensorSpec
from megatron_magistral.rollout.sglang_plugin import STATE_KEY
from megatron_magistral.weights.checksum import ChecksumSettings
from megatron_magistral.weights.delivery import EngineAddress
from megatron_magistral.weights.settings import PlanKind
from megatron_magistral.weights.transfer import UpdateFailed, WeightSender
from tests.rollout.fake_engine import FakeEngine, Fault

MANIFEST = (
    TensorSpec("a", (3, 5), "bfloat16"),
    TensorSpec("b", (7,), "float32"),
    TensorSpec("c", (2, 2, 2), "float32"),
)

BOUND_OF = {
    Phase.PAUSE: "pause_s",
    Phase.BEGIN: "begin_s",
    Phase.TRANSFER: "transfer_s",
    Phase.CHECKSUM: "checksum_s",
    Phase.STAMP: "end_s",
    Phase.END: "end_s",
    Phase.RESUME: "resume_s",
}
UPDATE_PATHS = {
    Phase.PAUSE: "/pause_generation",
    Phase.BEGIN: "/begin_weight_update",
    Phase.TRANSFER: "/update_weights_from_distributed",
    Phase.CHECKSUM: "/weights_checker",
    Phase.STAMP: "/update_weight_version",
    Phase.END: "/end_weight_update",
    Phase.RESUME: "/continue_generation",
}
BEFORE_TRANSFER = (Phase.PAUSE, Phase.BEGIN)


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    with WeightSender(MANIFEST, backend="gloo") as sender:
        yield sender


@pytest.fixture(params=PlanKind)
def sender_of_any_plan(request: pytest.FixtureRequest) -> Iterator[WeightSender]:
    with WeightSender(MANIFEST, backend="gloo", plan=request.param) as sender:
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


def test_every_engine_gets_every_tensor_bit_for_bit(sender_of_any_plan, engines) -> None:
    sender = sender_of_any_plan
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
    closing = (Phase.CHECKSUM, Phase.STAMP, Phase.END, Phase.RESUME)
    order += [UPDATE_PATHS[phase] for phase in closing]
    assert engine.calls[before:] == order


def test_tensors_are_converted_to_the_dtype_of_the_engines(engines) -> None:
    manifest = [TensorSpec("w", (4, 3), "bfloat16")]
    with WeightSender(manifest, backend="gloo", dtype=torch.bfloat16) as sender:
        sender.connect(addresses(engines))
        weight = torch.linspace(-1, 1, 12).view(3, 4)
        sender.send([[("w", weight.t())]], 1)
    assert torch.equal(engines[1].weights["w"], weight.t().to(torch.bfloat16))


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.HANG, Fault.DIE])
@pytest.mark.parametrize("phase", UPDATE_PATHS)
def test_an_engine_that_misses_a_phase_is_named_and_never_serves_partial_weights(
    phase: Phase, fault: Fault, engines
) -> None:
    bad, good = engines
    timeouts = ControlTimeouts(**{BOUND_OF[phase]: 1.0}) if fault is Fault.HANG else None
    with WeightSender(MANIFEST, backend="gloo", timeouts=timeouts) as sender:
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
        assert failure.value.updated == (() if phase in BEFORE_TRANSFER else ("engine1",))
        assert_holds(good, *((1.0, 1) if phase in BEFORE_TRANSFER else (2.0, 2)))


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


def test_an_engine_may_leave_and_another_join_between_updates(sender_of_any_plan, engines) -> None:
    sender = sender_of_any_plan
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
    sender = WeightSender(MANIFEST, backend="gloo", timeouts=ControlTimeouts(join_s=2.0))
    with sender, pytest.raises(UpdateFailed, match="engine engine1: join update group failed"):
        sender.connect(addresses(engines))


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"version": "0.5.23", "internal_states": [{}]}, "plugin is not active"),
        ({"version": "0.5.20"}, "SGLang 0.5.20 is too old"),
    ],
)
def test_a_server_that_cannot_be_updated_soundly_is_refused(info, why, sender, engines) -> None:
    engines[0].info = info
    with pytest.raises(UpdateFailed, match=f"engine engine0: server info failed.*{why}"):
        sender.connect(addresses(engines))


def test_a_server_newer_than_tested_is_a_warning(sender, engines, caplog) -> None:
    state = {"internal_states": [{STATE_KEY: {"active": True}}]}
    engines[1].info = {"version": "0.9.0"} | state
    sender.connect(addresses(engines))
    assert "engine engine1: SGLang 0.9.0 is newer than the newest tested" in caplog.text


def test_an_update_without_buckets_is_refused_before_the_pause(sender, engines) -> None:
    sender.connect(addresses(engines))
    with pytest.raises(ValueError, match="no buckets"):
        sender.send([], 1)
    assert "/pause_generation" not in engines[0].calls


HELD = {spec.name: (spec.shape, spec.dtype) for spec in MANIFEST}


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (HELD | {"d": ((2,), "float32")}, r"missing, parameters that nothing would fill: d"),
        ({"a": HELD["a"], "b": HELD["b"]}, r"extra, the engine's model has no such tensor: c"),
        (HELD | {"b": ((8,), "float32")}, r"wrong shape: b \[7\]: the model's is \(8,\)"),
        (HELD | {"b": ((7,), "bfloat16")}, r"wrong dtype: b is float32, the engine holds bfloat16"),
    ],
)
def test_an_engine_with_other_tensors_is_named_with_them_before_it_joins(
    held, why, sender, engines
) -> None:
    engines[1].parameters = held
    with pytest.raises(UpdateFailed, match=f"engine engine1: compare manifest failed.*{why}"):
        sender.connect(addresses(engines))
    for engine in engines:
        assert "/init_weights_update_group" not in engine.calls


def test_an_engine_with_other_bits_than_were_sent_is_named_and_never_serves(
    sender, engines
) -> None:
    sender.connect(addresses(engines))
    sender.send(some_buckets(1.0), 1)
    sender.connect(addresses(engines))  # the first update of a group checks every tensor
    engines[0].faults[UPDATE_PATHS[Phase.TRANSFER]] = Fault.CORRUPT
    with pytest.raises(
        UpdateFailed, match=r"engine0.*version 2: bits differ .*: b \(rank 0\)"
    ) as e:
        sender.send(some_buckets(2.0), 2)
    assert e.value.quarantined == ("engine0",) and e.value.updated == ("engine1",)
    assert engines[0].paused and engines[0].version == "1"
    assert_holds(engines[1], 2.0, 2)


def test_an_update_that_leaves_out_a_bucket_is_never_served(sender, engines) -> None:
    sender.connect(addresses(engines))
    sender.send(some_buckets(1.0), 1)
    with pytest.raises(UpdateFailed, match="never sent: c; quarantined: engine0, engine1"):
        sender.send(some_buckets(2.0)[:1], 2)
    for engine in engines:
        assert engine.paused and engine.version == "1"


@pytest.mark.parametrize("position", [0, 1])
def test_a_tensor_that_is_not_in_the_manifest_stops_the_update(position, sender, engines) -> None:
    sender.connect(addresses(engines))
    buckets = some_buckets(1.0)
    buckets[position].append(("x", torch.zeros(3)))
    with pytest.raises((ValueError, UpdateFailed), match=r"name='x'.*the manifest has None"):
        sender.send(buckets, 1)
    for engine in engines:
        assert engine.version == "default"
        assert engine.paused == (position > 0)


@pytest.mark.parametrize("position", [0, 1])
def test_a_tensor_of_another_dtype_than_the_manifest_says_stops_the_update(
    position, sender, engines
) -> None:
    sender.connect(addresses(engines))
    sender.send(some_buckets(1.0), 1)
    buckets = some_buckets(2.0)
    name, tensor = buckets[position].pop()
    buckets[position].append((name, tensor.to(torch.float16)))
    with pytest.raises((ValueError, UpdateFailed), match=r"dtype='float16'.*dtype='float32'"):
        sender.send(buckets, 2)
    for engine in engines:
        assert engine.version == "1"
        assert engine.paused == (position > 0)  # before the pause nothing has changed


def test_a_bucket_that_an_engine_lost_is_found_out_also_outside_the_sample(engines) -> None:
    """Every update checks a tensor of every bucket, whatever the sample is."""
    rarely = ChecksumSettings(sample_stride=1 << 20, full_every=1 << 20)
    with WeightSender(MANIFEST, backend="gloo", checksums=rarely) as sender:
        sender.connect(addresses(engines))
        sender.send(some_buckets(1.0), 1)  # the first one checks all
        load = UPDATE_PATHS[Phase.TRANSFER]
        for sound in (0, 1):  # buckets of the next update that arrive
            engines[0].faults[load] = Fault.LOSE
            engines[0].sound_calls[load] = engines[0].calls.count(load) + sound
            with pytest.raises(UpdateFailed, match="engine engine0: compare checksums") as failure:
                sender.send(some_buckets(2.0), 2)
            assert failure.value.quarantined == ("engine0",)
            assert engines[0].paused and engines[0].version == "1"
            engines[0].faults.clear()
            sender.connect(addresses(engines))
            sender.send(some_buckets(1.0), 1)
    assert_holds(engines[0], 1.0, 1)


def test_engines_that_join_in_the_reverse_order_have_their_own_ranks(sender, engines) -> None:
    engines[0].faults["/init_weights_update_group"] = Fault.DELAY
    sender.connect(addresses(engines))
    sender.send(some_buckets(1.0), 1)
    for engine in engines:
        assert_holds(engine, 1.0, 1)


def test_an_engine_that_waits_for_a_bucket_which_never_comes_is_free_at_once(engines) -> None:
    """The other one refuses its call when both have been called and nothing is on the wire."""
    bad, good = engines
    load = UPDATE_PATHS[Phase.TRANSFER]
    bounds = ControlTimeouts(end_s=5.0)  # far less than the engines' own bound for a broadcast
    with WeightSender(MANIFEST, backend="gloo", timeouts=bounds) as sender:
        sender.connect(addresses(engines))
        bad.faults[load] = Fault.REFUSE
        bad.sound_calls[load] = 1
        with pytest.raises(UpdateFailed, match="engine engine0: transfer bucket failed"):
            sender.send(some_buckets(1.0), 1)
        assert good.paused and good.version == "default"
        bad.faults.clear()
        sender.connect(addresses(engines))
        sender.send(some_buckets(2.0), 2)
    for engine in engines:
        assert_holds(engine, 2.0, 2)


def test_the_next_call_waits_at_the_engine_while_a_bucket_is_loaded(sender, engines) -> None:
    """A bucket that is loaded slowly does not hold up the call for the next one."""
    load = UPDATE_PATHS[Phase.TRANSFER]
    engine = engines[0]
    sender.connect(addresses(engines[:1]))
    called_before_answer = []
    handle = engine.update_weights_from_distributed

    def slow(payload):
        answer = handle(payload)
        time.sleep(0.3)
        called_before_answer.append(engine.calls.count(load))
        return answer

    engine.update_weights_from_distributed = slow
    sender.send(some_buckets(1.0), 1)
    assert called_before_answer == [2, 2]
    assert_holds(engine, 1.0, 1)
