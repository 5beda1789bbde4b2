"""The table of engine states, whole."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_magistral.rollout.engine_state import (
    TRANSITIONS,
    EngineEvent,
    EngineState,
    EngineStatus,
    IllegalTransition,
    state_metrics,
)

CASES = list(product(EngineState, EngineEvent))


@pytest.mark.parametrize(("state", "event"), CASES)
def test_an_event_leads_where_the_table_says_or_is_refused_by_name(
    state: EngineState, event: EngineEvent
) -> None:
    status = EngineStatus("e3", state)
    if (state, event) in TRANSITIONS:
        assert status.after(event, "why", 1.0).state is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"engine e3: {state} and then '{event}'"):
            status.after(event, "why", 1.0)


def test_only_an_update_or_a_sign_of_life_with_known_weights_makes_healthy() -> None:
    ways = {case for case, after in TRANSITIONS.items() if after is EngineState.HEALTHY}
    updates = {(state, EngineEvent.UPDATED) for state in EngineState}
    assert ways == updates | {(EngineState.SUSPECT, EngineEvent.INTACT)}


def test_only_a_healthy_engine_can_become_suspect() -> None:
    before = {state for (state, _), after in TRANSITIONS.items() if after is EngineState.SUSPECT}
    assert before == {EngineState.HEALTHY, EngineState.SUSPECT}


def test_a_restarted_engine_is_stale_before_it_is_healthy() -> None:
    after = {
        TRANSITIONS[EngineState.RESTARTING, event]
        for event in EngineEvent
        if (EngineState.RESTARTING, event) in TRANSITIONS and event is not EngineEvent.UPDATED
    }
    assert after == {EngineState.RESTARTING, EngineState.DEAD, EngineState.STALE}


def test_every_state_can_be_left_and_reached() -> None:
    left = {state for (state, _), after in TRANSITIONS.items() if after is not state}
    reached = {after for (state, _), after in TRANSITIONS.items() if after is not state}
    assert left == reached == set(EngineState)


def test_a_status_keeps_when_its_state_began_and_counts_restarts() -> None:
    status = EngineStatus("e", EngineState.SUSPECT, since_s=1.0)
    assert status.after(EngineEvent.MISSED, "again", 2.0).since_s == 1.0
    dead = status.after(EngineEvent.SILENT, "gone", 3.0)
    assert dead.since_s == 3.0
    again = dead.after(EngineEvent.RESTART, "", 4.0).after(EngineEvent.SILENT, "", 5.0)
    assert again.after(EngineEvent.RESTART, "", 6.0).num_restarts == 2


def test_metrics_count_every_engine_once_and_all_restarts() -> None:
    statuses = [
        EngineStatus("a", EngineState.HEALTHY, num_restarts=2),
        EngineStatus("b", EngineState.HEALTHY),
        EngineStatus("c", EngineState.RESTARTING, num_restarts=1),
    ]
    metrics = state_metrics(statuses)
    assert metrics.pop("engine_restarts_total") == 3.0
    assert metrics == {
        "engines_healthy": 2.0,
        "engines_suspect": 0.0,
        "engines_dead": 0.0,
        "engines_restarting": 1.0,
        "engines_stale": 0.0,
    }
