"""Updates of several fake engines over a real gloo group, one of which fails: the rest goes on.

Every test ends within bounds that are far below the suite's; none measures a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from megatron_magistral.rollout.engine import ControlTimeouts, EngineMismatch, Phase, TensorSpec
from megatron_magistral.rollout.engine_state import EngineState
from megatron_magistral.weights.checksum import ChecksumSettings
from megatron_magistral.weights.delivery import EngineAddress
from megatron_magistral.weights.fleet import Fleet, FleetSettings, Round
from megatron_magistral.weights.transfer import UpdateFailed, WeightSender
from tests.rollout.fake_engine import FakeEngine, Fault
from tests.weights.test_transfer import UPDATE_PATHS

MANIFEST = (TensorSpec("a", (3, 5), "float32"), TensorSpec("b", (4,), "float32"))
SETTINGS = FleetSettings(alive_s=3.0, wait_s=60.0)


MakeFleet = Callable[..., Fleet]


@pytest.fixture
def make_fleet() -> Iterator[MakeFleet]:
    fleets: list[Fleet] = []

    def make(
        engines: list[FakeEngine],
        settings: FleetSettings = SETTINGS,
        timeouts: ControlTimeouts | None = None,
    ) -> Fleet:
        every = ChecksumSettings(full_every=1)
        sender = WeightSender(MANIFEST, backend="gloo", timeouts=timeouts, checksums=every)
        addresses = [EngineAddress(e.url, name=f"e{i}") for i, e in enumerate(engines)]
        fleets.append(Fleet(sender, addresses, settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def buckets(version: int) -> Iterator[list[tuple[str, Tensor]]]:
    yield [("a", torch.full((3, 5), float(version)))]
    yield [("b", torch.full((4,), float(version)))]


def update(fleet: Fleet, version: int, pinned: Iterable[str] = ()) -> list[Round]:
    """All rounds of one update."""
    fleet.begin(version, pinned)
    rounds = [fleet.round(buckets(version))]
    while rounds[-1] is Round.AGAIN:
        rounds.append(fleet.round(buckets(version)))
    return rounds


def serves(engine: FakeEngine, version: int) -> bool:
    whole = all((engine.weights[s.name] == version).all() for s in MANIFEST)
    return whole and engine.version == str(version) and not engine.paused


def states(fleet: Fleet) -> list[EngineState]:
    return [status.state for status in fleet.statuses.values()]


def test_an_update_without_faults_is_one_round(engines, make_fleet) -> None:
    fleet = make_fleet(engines)
    fleet.connect()
    for version in (1, 2):
        assert update(fleet, version) == [Round.DONE]
        assert fleet.serving == ["e0", "e1"]
        assert all(serves(engine, version) for engine in engines)


def test_a_pinned_engine_keeps_its_version_until_it_is_released(engines, make_fleet) -> None:
    fleet = make_fleet(engines)
    fleet.connect()
    update(fleet, 1)
    assert update(fleet, 2, pinned=["e0"]) == [Round.DONE]
    assert fleet.serving == ["e1"]
    assert serves(engines[0], 1) and serves(engines[1], 2)
    assert update(fleet, 3) == [Round.DONE]
    assert all(serves(engine, 3) for engine in engines)


def test_a_pinned_engine_is_updated_where_it_is_the_last_one(engines, make_fleet) -> None:
    fleet = make_fleet(engines)
    fleet.connect()
    update(fleet, 1)
    engines[1].faults[UPDATE_PATHS[Phase.BEGIN]] = Fault.DIE
    assert update(fleet, 2, pinned=["e0"])[-1] is Round.DONE
    assert fleet.serving == ["e0"] and serves(engines[0], 2)


@pytest.mark.parametrize(
    "phase",
    [
        # Each takes four seconds, so `make test` kills one before its weights change and one after.
        pytest.param(phase, marks=[] if phase in (Phase.BEGIN, Phase.STAMP) else pytest.mark.slow)
        for phase in UPDATE_PATHS
    ],
)
def test_an_engine_that_dies_in_a_phase_is_named_dead_and_the_others_go_on(
    phase: Phase, engines, make_fleet
) -> None:
    fleet = make_fleet(engines)
    fleet.connect()
    update(fleet, 1)
    engines[0].faults[UPDATE_PATHS[phase]] = Fault.DIE
    assert update(fleet, 2)[-1] is Round.DONE
    assert fleet.serving == ["e1"] and serves(engines[1], 2)
    assert states(fleet) == [EngineState.DEAD, EngineState.HEALTHY]
    assert f"engine e0: {phase} failed after" in fleet.statuses["e0"].why
    assert update(fleet, 3) == [Round.DONE]
    assert serves(engines[1], 3)


@pytest.mark.parametrize("phase", UPDATE_PATHS)
def test_an_engine_that_refuses_a_phase_once_is_updated_in_another_round(
    phase: Phase, engines, make_fleet
) -> None:
    fleet = make_fleet(engines)
    fleet.connect()
    update(fleet, 1)
    engines[0].faults[UPDATE_PATHS[phase]] = Fault.REFUSE
    fleet.begin(2)
    assert fleet.round(buckets(2)) is Round.AGAIN
    assert engines[0].version in ("1", "2") and not serves(engines[0], 2)
    engines[0].faults.clear()
    assert fleet.round(buckets(2)) is Round.DONE
    assert all(serves(engine, 2) for engine in engines)


def test_an_engine_that_always_fails_is_left_out_and_never_serves_what_it_has(
    engines, make_fleet
) -> None:
    fleet = make_fleet(engines)
    fleet.connect()
    update(fleet, 1)
    engines[0].faults[UPDATE_PATHS[Phase.TRANSFER]] = Fault.CORRUPT
    assert update(fleet, 2)[-1] is Round.DONE
    assert fleet.serving == ["e1"]
    assert engines[0].paused and engines[0].version == "1"
    assert states(fleet) == [EngineState.STALE, EngineState.HEALTHY]
    assert fleet.num_mismatches == SETTINGS.max_tries
    engines[0].faults.clear()
    assert update(fleet, 3) == [Round.DONE]
    assert all(serves(engine, 3) for engine in engines)


def test_a_hung_engine_ends_within_the_bound_of_its_phase(engines, make_fleet) -> None:
    fleet = make_fleet(engines, timeouts=ControlTimeouts(begin_s=1.0))
    fleet.connect()
    engines[1].faults[UPDATE_PATHS[Phase.BEGIN]] = Fault.HANG
    assert update(fleet, 1)[-1] is Round.DONE
    assert fleet.serving == ["e0"] and serves(engines[0], 1)
    assert "begin update failed after" in fleet.statuses["e1"].why


def test_no_engine_left_is_a_failure_that_names_all(engines, make_fleet) -> None:
    fleet = make_fleet(engines, FleetSettings(alive_s=0.2, wait_s=0.5))
    fleet.connect()
    for engine in engines:
        engine.faults[UPDATE_PATHS[Phase.PAUSE]] = Fault.DIE
    assert update(fleet, 1)[-1] is Round.FAILED
    gone = (EngineState.DEAD, EngineState.RESTARTING)
    assert all(state in gone for state in states(fleet))
    assert "engine e0: " in fleet.describe() and "engine e1: " in fleet.describe()


def test_the_last_engine_is_waited_for_while_it_restarts(engines, make_fleet) -> None:
    fleet = make_fleet(engines[:1])
    fleet.connect()
    update(fleet, 1)
    port = engines[0].port
    engines[0].faults[UPDATE_PATHS[Phase.BEGIN]] = Fault.DIE
    fleet.begin(2)
    assert fleet.round(buckets(2)) is Round.AGAIN
    engines[0].close()
    engines[0] = FakeEngine(port=port)
    assert fleet.round(buckets(2)) is Round.DONE
    assert serves(engines[0], 2)


def test_every_round_iterates_all_buckets(engines, make_fleet) -> None:
    fleet = make_fleet(engines, FleetSettings(alive_s=0.2, wait_s=0.2))
    fleet.connect()
    for engine in engines:
        engine.close()
    fleet.begin(1)
    source = buckets(1)
    while fleet.round(source) is Round.AGAIN:
        assert next(source, None) is None
        source = buckets(1)
    assert next(source, None) is None


def test_a_restarted_engine_is_found_and_gets_a_full_update(engines, make_fleet) -> None:
    fleet = make_fleet(engines)
    fleet.connect()
    update(fleet, 1)
    port = engines[0].port
    engines[0].close()
    assert update(fleet, 2)[-1] is Round.DONE
    assert states(fleet) == [EngineState.DEAD, EngineState.HEALTHY]
    engines[0] = FakeEngine(port=port)
    assert update(fleet, 3) == [Round.DONE]
    assert all(serves(engine, 3) for engine in engines)
    assert fleet.statuses["e0"].num_restarts == 1


def test_an_engine_replaced_between_updates_does_not_break_the_transfer(
    engines, make_fleet
) -> None:
    fleet = make_fleet(engines)
    fleet.connect()
    update(fleet, 1)
    port = engines[0].port
    engines[0].close()
    engines[0] = FakeEngine(port=port)
    assert update(fleet, 2) == [Round.DONE]
    assert all(serves(engine, 2) for engine in engines)


def test_engines_join_and_leave_between_updates(engines, make_fleet) -> None:
    fleet = make_fleet(engines[:1])
    fleet.connect()
    update(fleet, 1)
    fleet.join(EngineAddress(engines[1].url, name="e1"))
    assert update(fleet, 2) == [Round.DONE]
    assert all(serves(engine, 2) for engine in engines)
    fleet.leave("e0")
    assert update(fleet, 3) == [Round.DONE]
    assert serves(engines[1], 3) and serves(engines[0], 2)


def test_join_order_does_not_matter(engines, make_fleet) -> None:
    first, second = make_fleet(engines), make_fleet(engines[::-1])
    for version, fleet in enumerate((first, second), 1):
        fleet.connect()
        assert update(fleet, version) == [Round.DONE]
        assert all(serves(engine, version) for engine in engines)
        fleet.close()


def test_a_new_sender_takes_over_engines_that_a_dead_one_left_paused(engines, make_fleet) -> None:
    dying, heir = make_fleet(engines), make_fleet(engines)
    dying.connect()
    update(dying, 1)

    def breaks_off() -> Iterator[list[tuple[str, Tensor]]]:
        yield next(buckets(2))
        raise KeyboardInterrupt

    dying.begin(2)
    with pytest.raises(KeyboardInterrupt):
        dying.round(breaks_off())
    assert all(engine.paused and engine.session_open for engine in engines)
    assert {engine.version for engine in engines} == {"1"}
    heir.connect()
    assert update(heir, 3) == [Round.DONE]
    assert all(serves(engine, 3) for engine in engines)


def test_the_first_connection_needs_every_engine(engines, make_fleet) -> None:
    fleet = make_fleet(engines)
    engines[1].parameters = {"a": ((3, 5), "float32"), "b": ((4,), "bfloat16")}
    with pytest.raises(UpdateFailed, match="engine e1: compare manifest") as failure:
        fleet.connect()
    assert isinstance(failure.value.errors[0], EngineMismatch)
