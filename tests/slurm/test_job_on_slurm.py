"""launch/tiny.sh on a real SLURM of this machine: two nodes, a micro model, every role.

Needs Debian's packages slurm-wlm and munge, and root or the right to write munge's key.
`pytest -m slurm tests/slurm` takes about 8 min on 2 cores.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder
from tests.slurm.cluster import SlurmCluster, missing_programs

ROOT = Path(__file__).parents[2]
NUM_NODES = 3
RL_STEPS = 12
TIMEOUT_S = 900.0
"""A bound against hanging on a busy machine, not an expectation."""
POLL_S = 1.0
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {missing_programs()}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    # Paths of sockets are short, those of pytest's directories are not.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with SlurmCluster(folder / "cluster", NUM_NODES) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder)


class Job:
    """launch/tiny.sh, submitted with a micro model."""

    def __init__(
        self, cluster: SlurmCluster, folder: Path, *arguments: str, nodes: int = 2, **variables: str
    ) -> None:
        self._cluster = cluster
        self._log = folder / "job.log"
        self.run = RunFolder(folder / "run")
        variables = {
            "RUN": str(self.run.root),
            "VENV": sys.prefix,
            "CONFIG": "tests/micro.yaml",
            "MIN_TIME_S": "60",
        } | variables
        self.id = cluster.submit(
            f"--nodes={nodes}",
            "--ntasks-per-node=2",
            f"--output={self._log}",
            "launch/tiny.sh",
            *("verifier.num_slots=1", f"rl.num_steps={RL_STEPS}", "checkpoint.rl_every_steps=1"),
            *arguments,
            cwd=ROOT,
            **variables,
        )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def state(self) -> str:
        return self._cluster.job(self.id)["JobState"]

    def saved_steps(self) -> int:
        return CheckpointFolder(self.run.checkpoints(Stage.RL)).latest() or 0

    def rows(self, stage: str) -> list[dict[str, float]]:
        lines = self.run.metrics.read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["stage"] == stage]

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.state not in OVER, f"{self.state} before {what}:\n{self.log}"
            assert time.monotonic() < deadline, f"{what} not in time:\n{self.log}"
            time.sleep(POLL_S)

    def wait(self) -> dict[str, str]:
        deadline = time.monotonic() + TIMEOUT_S
        while self.state not in OVER:
            assert time.monotonic() < deadline, f"not over in time:\n{self.log}"
            time.sleep(POLL_S)
        return self._cluster.job(self.id)

    def cancel(self) -> None:
        self._cluster.run("scancel", str(self.id))


def test_a_job_survives_the_death_of_a_generator_a_time_limit_and_a_requeue(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path)
    job.wait_until("the first steps", lambda: job.saved_steps() >= 2)

    for process in cluster.processes("sglang.launch_server"):
        process.send_signal(signal.SIGKILL)
    job.wait_until("a restart of the generator", lambda: "restart 1 of" in job.log)
    before = job.saved_steps()
    job.wait_until("a step with the new generator", lambda: job.saved_steps() > before + 1)

    cluster.run("scancel", "--batch", "--signal=USR1", str(job.id))  # as --signal=B:USR1 does it
    job.wait_until("a requeue", lambda: "requeue: stopped as asked" in job.log)
    stopped_at = job.saved_steps()
    job.wait_until("a resume", lambda: f"rl goes on after step {stopped_at}" in job.log)
    job.wait_until("a step after it", lambda: job.saved_steps() > stopped_at)

    cluster.run("scontrol", "requeue", str(job.id))  # as a preemption does it
    job.wait_until("a second resume", lambda: job.log.count("rl goes on after step") == 2)
    ended = job.wait()

    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "2")
    assert [row["step"] for row in job.rows("rl")] == list(range(RL_STEPS))
    assert job.run.model.is_dir()
    assert "done: every stage has ended" in job.log
    logs = {path.name for path in (job.run.root / "logs").iterdir()}
    assert {"generator-0.node2.log", "trainer-1.node1.log", "verifier-1.node2.log"} <= logs
    assert cluster.processes("megatron_magistral") == []


@pytest.mark.parametrize(
    ("nodes", "arguments", "variables", "message"),
    [
        (3, (), {}, r"nodes = 3: 2 trainer ranks and 1 generators of 1 GPUs fill 2"),
        (2, ("rl.n_batch=17",), {}, r"n_batch = 17 must be a multiple of group_size = 4"),
        (2, (), {"MIN_TIME_S": "90000"}, r"the time limit leaves 1\d\d\.\d min, .*longer --time"),
    ],
    ids=["nodes", "config", "time limit"],
)
def test_bad_input_ends_the_job_with_one_message(
    cluster: SlurmCluster,
    tmp_path: Path,
    nodes: int,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    message: str,
) -> None:
    job = Job(cluster, tmp_path, *arguments, nodes=nodes, **variables)
    assert job.wait()["JobState"] == "FAILED"
    assert re.search(message, job.log), job.log
    assert "Traceback" not in job.log
    assert not job.run.root.exists()
