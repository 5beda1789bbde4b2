"""What becomes of a job when its roles have ended: it is done, requeued, or has failed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_magistral.signals import STOPPED
from megatron_magistral.slurm.plan import Safe


class Verdict(StrEnum):
    DONE = "done"
    REQUEUE = "requeue"
    FAIL = "fail"


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    why: str


def judge(code: int, began: Safe, now: Safe, *, num_restarts: int, max_restarts: int) -> Outcome:
    """`code` is what the attempt ended with, `began` what was safe when it began.

    A stop that was asked for is always followed by another attempt. A failure is, if the attempt
    has saved something new, so that a fault which always comes back ends the job.
    """
    where = f"{now.num_stages} stages have ended, {now.num_steps} steps of the next are saved"
    if code == 0:
        return Outcome(Verdict.DONE, "every stage has ended")
    if code == STOPPED:
        return Outcome(Verdict.REQUEUE, f"stopped as asked; {where}")
    if now <= began:
        return Outcome(Verdict.FAIL, f"it has saved nothing since it began, so not again; {where}")
    if num_restarts >= max_restarts:
        return Outcome(Verdict.FAIL, f"failed after {num_restarts} restarts, the most; {where}")
    return Outcome(Verdict.REQUEUE, f"failed, and goes on from what is saved: {where}")
