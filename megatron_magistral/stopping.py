"""How a run ends that is asked to: its trainers save after their present step, if that is soon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_magistral.cluster import RoleFailed, StageTimeout, Supervisor
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.signals import Stopped


@contextlib.contextmanager
def saving_when_stopped(supervisor: Supervisor, run: RunFolder, grace_s: float) -> Iterator[None]:
    """Lets trainers that have begun save before `Stopped` goes on, for at most `grace_s`.

    They end by themselves then, with exit code 75; who has not ended yet is ended afterwards.
    """
    try:
        yield
    except Stopped:
        trainers = [name for name in supervisor.running if name.startswith("trainer")]
        if trainers and grace_s > 0 and (run.phase.exists() or run.metrics.exists()):
            run.stop_requested.touch()
            with contextlib.suppress(RoleFailed, StageTimeout):
                supervisor.wait_for(trainers, timeout_s=grace_s)
            run.stop_requested.unlink(missing_ok=True)
        raise
