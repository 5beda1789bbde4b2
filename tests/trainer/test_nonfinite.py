"""Steps that are not finite: the batch is kept, and a run that only skips ends."""

import math

import pytest

from megatron_magistral.trainer.nonfinite import (
    MAX_KEPT_BATCHES,
    NonFiniteSteps,
    NonFiniteWatch,
    read_kept_batch,
)
from megatron_magistral.trainer.step import StepStats, StepStatus
from tests.trainer.models import random_sequences

GOOD = StepStats(StepStatus.UPDATED, 1.0, 1.0, 1e-3, {})
BAD = StepStats(StepStatus.NON_FINITE, math.nan, math.inf, 0.0, {})
SEQUENCES = random_sequences([(2, 3), (1, 4)])


@pytest.fixture
def watch(tmp_path):
    return NonFiniteWatch("rl", 3, tmp_path / "nonfinite", data_rank=1)


def test_so_many_in_a_row_end_the_run_with_the_reason(watch, tmp_path):
    for step in (5, 6):
        watch.look(step, [BAD], [SEQUENCES])
    with pytest.raises(NonFiniteSteps) as caught:
        watch.look(7, [BAD], [SEQUENCES])
    assert str(caught.value) == (
        "rl step 7: 3 optimizer steps in a row were skipped, the last with loss nan and gradient "
        f"norm inf; the batches are in {tmp_path / 'nonfinite'}"
    )


def test_a_good_step_in_between_begins_the_count_anew(watch):
    for step in range(0, 12, 3):
        for offset, stats in enumerate((BAD, BAD, GOOD)):
            watch.look(step + offset, [stats], [SEQUENCES])


def test_optimizer_steps_of_one_batch_count_one_by_one(watch):
    with pytest.raises(NonFiniteSteps, match="rl step 0: 3 optimizer steps in a row"):
        watch.look(0, [GOOD, BAD, BAD, BAD], [SEQUENCES] * 4)


def test_the_batch_that_was_skipped_is_kept_as_it_was(watch, tmp_path):
    (first, *rest) = SEQUENCES
    odd = type(first)(
        first.tokens, first.num_prompt_tokens, (math.nan,) * 3, first.spans, math.inf, 1.0
    )
    watch.look(4, [GOOD, BAD], [SEQUENCES, [odd, *rest]])
    (path,) = (tmp_path / "nonfinite").iterdir()
    kept = read_kept_batch(path)
    assert (kept.stage, kept.step, kept.minibatch) == ("rl", 4, 1)
    assert math.isnan(kept.loss) and math.isinf(kept.grad_norm)
    assert math.isnan(kept.sequences[0].logprobs[2]) and math.isinf(kept.sequences[0].advantage)
    assert kept.sequences[1:] == tuple(rest)


def test_no_more_than_a_bounded_number_is_kept_the_newest(watch, tmp_path):
    for step in range(0, 60, 2):
        watch.look(step, [BAD], [SEQUENCES])
        watch.look(step + 1, [GOOD], [SEQUENCES])
    steps = sorted(read_kept_batch(path).step for path in (tmp_path / "nonfinite").iterdir())
    assert steps == list(range(60 - 2 * MAX_KEPT_BATCHES, 60, 2))


def test_ranks_that_hold_the_same_sequences_keep_nothing(tmp_path):
    watch = NonFiniteWatch("sft", 2, None, data_rank=0)
    watch.look(0, [BAD], [SEQUENCES])
    with pytest.raises(NonFiniteSteps, match="sft step 1: 2 optimizer steps in a row"):
        watch.look(1, [BAD], [SEQUENCES])
    assert list(tmp_path.iterdir()) == []
