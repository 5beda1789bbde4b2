"""Which traces are held out for validation."""

import pytest

from megatron_magistral.config_stages import OptimizerConfig, SftConfig
from megatron_magistral.trainer.validation import split_traces
from megatron_magistral.types import Trace

TRACES = [Trace(f"p{i // 3}", f"statement {i // 3}", f"response {i}") for i in range(900)]


def test_every_trace_is_on_one_side_and_all_of_a_problem_on_the_same():
    training, held_out = split_traces(TRACES, 0.2, seed=0)
    assert sorted(map(str, training + held_out)) == sorted(map(str, TRACES))
    assert not {t.problem_id for t in training} & {t.problem_id for t in held_out}


def test_about_the_fraction_is_held_out():
    _, held_out = split_traces(TRACES, 0.2, seed=0)
    assert 120 <= len(held_out) <= 240


def test_a_file_that_grows_keeps_what_was_held_out():
    _, before = split_traces(TRACES[:300], 0.2, seed=0)
    _, after = split_traces(TRACES, 0.2, seed=0)
    assert set(before) <= set(after)


def test_seeds_hold_out_different_problems():
    assert split_traces(TRACES, 0.2, seed=0) != split_traces(TRACES, 0.2, seed=1)


def test_without_validation_everything_is_trained():
    assert split_traces(TRACES, 0.0, seed=0) == (TRACES, [])


def test_a_side_without_traces_is_an_error():
    with pytest.raises(ValueError, match=r"validation_fraction = 0\.5: leaves \d .* of 1 in all"):
        split_traces([Trace("p1", "s", "r")], 0.5, seed=0)


@pytest.mark.parametrize(
    ("num_traces", "num_epochs", "num_steps"), [(8, 2, 4), (9, 1, 3), (9, 4, 9), (3, 1, 1)]
)
def test_epochs_are_as_many_steps_as_it_takes_to_see_every_trace_so_often(
    num_traces, num_epochs, num_steps
):
    config = SftConfig(
        num_epochs=num_epochs, batch_size=4, microbatch_tokens=8, optimizer=OptimizerConfig(lr=1.0)
    )
    assert config.total_steps(num_traces) == num_steps
