from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from megatron_magistral.rollout.engine_state import EngineState, EngineStatus
from megatron_magistral.rollout.prometheus import RunExposition


def samples(exposition: RunExposition) -> dict[tuple[str, tuple[str, ...]], float]:
    text = exposition.render().decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def exposition(
    live: Mapping[str, float] | None = None, engines: Mapping[str, EngineStatus] | None = None
) -> RunExposition:
    return RunExposition(lambda: live or {}, lambda: engines or {})


def test_before_the_first_step_there_is_an_answer_too() -> None:
    assert samples(exposition()) == {("magistral_step", ()): -1.0}


def test_the_last_trained_step_is_shown_under_the_names_of_metrics_jsonl() -> None:
    shown = exposition()
    shown.trained(3, {"reward_mean": 0.25})
    shown.trained(4, {"reward_mean": 0.5})
    found = samples(shown)
    assert found["magistral_step", ()] == 4.0
    assert found["magistral_reward_mean", ()] == 0.5


def test_numbers_that_only_grow_are_counters() -> None:
    shown = exposition()
    shown.trained(0, {"groups_dropped_total": 7.0})
    assert samples(shown)["magistral_groups_dropped_total", ()] == 7.0
    assert "# TYPE magistral_groups_dropped_total counter" in shown.render().decode()


def test_live_numbers_are_those_of_the_scrape_and_hide_the_steps() -> None:
    live = {"queue_sequences": 1.0}
    shown = exposition(live)
    shown.trained(0, {"queue_sequences": 99.0})
    live["queue_sequences"] = 2.0
    assert samples(shown)["magistral_queue_sequences", ()] == 2.0


def test_each_engine_is_in_exactly_one_state() -> None:
    status = EngineStatus("http://node1:30000", EngineState.SUSPECT)
    found = samples(exposition(engines={status.name: status}))
    states = {labels[1]: value for (name, labels), value in found.items() if labels}
    assert states == {str(s): float(s is EngineState.SUSPECT) for s in EngineState}
