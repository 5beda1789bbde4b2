"""launch/tiny.sh on a real SLURM of this machine: two nodes, a micro model, every role.

Needs Debian's packages slurm-wlm and munge, and root. `pytest -m slurm tests/slurm` takes about
12 min on 2 cores.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_magistral.config_file import dump, load
from megatron_magistral.data.tokenizer import build_tokenizer
from megatron_magistral.evals.report import EvalReport
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.selection import best_step
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder, SavedState
from megatron_magistral.trainer.fingerprint import training_values
from megatron_magistral.types import Progress
from tests.slurm.cluster import SlurmCluster, missing_programs
from tests.slurm.jobs import MICRO
from tests.test_bad_input import model as made_model

ROOT = Path(__file__).parents[2]
NUM_NODES = 3
RL_STEPS = 12
OVERRIDES = ("verifier.num_slots=1", f"rl.num_steps={RL_STEPS}", "checkpoint.rl_every_steps=1")
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
        self,
        cluster: SlurmCluster,
        folder: Path,
        *arguments: str,
        nodes: int = 2,
        sbatch: Sequence[str] = (),
        **variables: str,
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
            *sbatch,
            "launch/tiny.sh",
            *OVERRIDES,
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
        return self._cluster.wait(self.id, OVER, TIMEOUT_S)

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


def test_a_job_keeps_the_weights_of_sft_that_solve_most_and_goes_on_measuring_after_a_requeue(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = Job(
        *(cluster, tmp_path, "rl=null", "sft.num_steps=20", "sft.candidate_every_steps=10"),
        "evaluation.num_samples=16",  # seconds, in which it can be interrupted
        nodes=1,
    )
    measured = job.run.eval_candidate
    job.wait_until("a measured candidate", lambda: measured(10).exists())
    first = measured(10).read_bytes()
    cluster.run("scancel", "--batch", "--signal=USR1", str(job.id))
    ended = job.wait()

    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.log
    assert ended["Restarts"] == "1"
    assert "requeue: stopped as asked; 2 stages have ended, 1 steps" in job.log
    assert "selection goes on: 1 of 2 candidates are measured" in job.log
    assert measured(10).read_bytes() == first
    reports = {step: EvalReport.load(measured(step)) for step in job.run.sft_candidates()}
    assert json.loads(job.run.sft_selected.read_text())["step"] == best_step(reports)
    assert list(reports) == [10, 20]
    assert job.run.model.is_dir()
    logs = {path.name for path in (job.run.root / "logs").iterdir()}
    assert {"generator-0.node1.log", "trainer-1.node1.log"} <= logs  # one after the other
    assert cluster.processes("megatron_magistral") == []


@pytest.mark.parametrize(
    ("nodes", "arguments", "variables", "message"),
    [
        (3, (), {}, r"nodes = 3: 2 trainer ranks and 1 generators of 1 GPUs fill 2"),
        (2, ("rl.n_batch=17",), {}, r"n_batch = 17 must be a multiple of group_size = 4"),
        (2, (), {"MIN_TIME_S": "90000"}, r"the time limit leaves 1\d\d\.\d min, .*longer --time"),
        (2, (), {"VENV": "/nowhere"}, r"VENV = /nowhere: there is no virtual environment"),
    ],
    ids=["nodes", "config", "time limit", "environment"],
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


def test_the_broadcast_benchmark_runs_as_a_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Whether its goals are met is another matter."""
    log, results = tmp_path / "job.log", tmp_path / "results.json"
    job_id = cluster.submit(
        *("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", f"--output={log}"),
        "launch/bench_broadcast.sh",
        *("--model", "8", "--tp", "1", "--replicas", "1", "--generator-tp", "1"),
        *("--json", str(results)),
        cwd=ROOT,
        VENV=sys.prefix,
    )
    cluster.wait(job_id, OVER, TIMEOUT_S)
    assert "1 of 1 pairs of ranks are good" in log.read_text()
    assert "\x1b[" not in log.read_text()  # colours are for terminals
    assert json.loads(results.read_text())


# --- what is wrong with a node or a run is found at once, and said once ---------------------------

GPU = "NVIDIA H100 80GB HBM3, 550.90.07, 4"
NVIDIA_SMI = f"""#!/bin/sh
echo '0, {GPU}'
if [ "$SLURMD_NODENAME" != "$FEWER_GPUS_ON" ]; then echo '1, {GPU}'; fi
"""


def refused(job: Job, message: str) -> None:
    """It ended with exit code 2, and its log says why, once."""
    ended = job.wait()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0"), job.log
    assert len(re.findall(message, job.log)) == 1, job.log
    assert "Traceback" not in job.log


def test_a_node_that_lacks_a_gpu_is_named(cluster: SlurmCluster, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    job = Job(cluster, tmp_path, sbatch=["--gpus-per-node=2"], PATH=path, FEWER_GPUS_ON="node2")
    refused(job, r"node2: GPUs: the driver shows 1, the job has 2 on each node: drain this node")


def test_a_model_that_is_missing_on_one_node_is_named(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    model = cluster.not_on_last / "model"
    overrides = made_model(model, build_tokenizer(["one two three four"], 300))
    job = Job(cluster, tmp_path, *overrides, sbatch=[f"--nodelist=node1,node{NUM_NODES}"])
    refused(job, rf"node{NUM_NODES}: model\.path = {model}: no Hugging Face model there")


def begun_run(folder: Path) -> RunFolder:
    """The run folder of an earlier job, of which SFT has two checkpoints without tensors."""
    run, config = RunFolder(folder / "run"), load(MICRO, OVERRIDES)
    run.root.mkdir()
    run.config.write_text(dump(config))
    run.mark_finished(Stage.PREPARE)
    checkpoints = CheckpointFolder(run.checkpoints(Stage.SFT))
    for step in (20, 40):
        (checkpoints.begin(step) / "__0_0.distcp").write_bytes(b"tensors")
        state = SavedState(Progress(step), {}, training_values(config, "sft"))
        checkpoints.commit(step, state, {})
    return run


def test_a_run_that_another_process_still_writes_to_is_refused(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    with begun_run(tmp_path).lock("trainer"):
        refused(Job(cluster, tmp_path), r"trainer\.lock: is held by another process after 45 s")


def test_a_changed_config_is_refused_with_the_keys_that_differ(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    begun_run(tmp_path)
    job = Job(cluster, tmp_path, "sft.optimizer.lr=0.5", "rl.n_async=16")
    refused(
        job,
        r"has changed since the run began: rl\.n_async = 16, was 32; "
        r"sft\.optimizer\.lr = 0\.5, was 0\.01\. Put it back, or submit with ALLOW_CHANGES=1",
    )


def test_a_checkpoint_that_was_damaged_is_refused_with_the_one_before_it(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    run = begun_run(tmp_path)
    checkpoint = CheckpointFolder(run.checkpoints(Stage.SFT)).path(40)
    (checkpoint / "__0_0.distcp").write_bytes(b"ten")
    refused(Job(cluster, tmp_path), r"__0_0\.distcp: has 3 bytes; 7 were written.*--step 20")
