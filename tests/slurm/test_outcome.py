"""What becomes of a job: it is requeued as long as that leads somewhere."""

from __future__ import annotations

import pytest

from megatron_magistral.signals import STOPPED
from megatron_magistral.slurm.outcome import Verdict, judge
from megatron_magistral.slurm.plan import Safe


@pytest.mark.parametrize(
    ("code", "now", "num_restarts", "verdict"),
    [
        (0, Safe(3, 0), 0, Verdict.DONE),
        (STOPPED, Safe(1, 20), 99, Verdict.REQUEUE),  # time limits are no failures
        (1, Safe(1, 30), 0, Verdict.REQUEUE),
        (1, Safe(2, 0), 0, Verdict.REQUEUE),
        (1, Safe(1, 20), 0, Verdict.FAIL),  # it would fail again at the same place
        (1, Safe(1, 30), 20, Verdict.FAIL),
        (137, Safe(0, 0), 0, Verdict.FAIL),
    ],
)
def test_a_job_is_requeued_after_a_failure_only_if_it_had_got_further(
    code: int, now: Safe, num_restarts: int, verdict: Verdict
) -> None:
    outcome = judge(code, Safe(1, 20), now, num_restarts=num_restarts, max_restarts=20)
    assert outcome.verdict is verdict
