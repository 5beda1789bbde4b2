"""kill -9 of generators, verifier, trainer and controller at random moments: nothing is lost.

Twenty kills take half a minute; a hundred are slow: `pytest -m slow tests/rollout/test_chaos.py`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.broadcast.launch import _CONTEXT, preload
from megatron_magistral.audit_run import audit_run
from megatron_magistral.cluster import free_ports
from megatron_magistral.rollout.audit import Fate
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder
from tests.rollout import chaos

preload("megatron_magistral.trainer.step", "tests.trainer.models", "tests.rollout.chaos")

TIMEOUT_S = 300.0
"""Of one run; a bound against hanging on a slow machine, not an expectation."""


class Run:
    """The processes of one run, each of which can be killed and comes back at once."""

    def __init__(self, root: Path, num_steps: int) -> None:
        self.folder = RunFolder(root)
        ports = free_ports(4)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        engines, verifier = urls[2:], urls[1]
        self._roles: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
            "engine-0": (chaos.serve_engine, (ports[2],)),
            "engine-1": (chaos.serve_engine, (ports[3],)),
            "verifier": (chaos.serve_verifier, (ports[1],)),
            "controller": (chaos.control, (root, num_steps, ports[0], engines, verifier)),
            "trainer": (chaos.train, (root, num_steps, ports[0], engines)),
        }
        self._processes: dict[str, BaseProcess] = {}
        self.kills: Counter[str] = Counter()

    def __enter__(self) -> Run:
        for role in self._roles:
            self._start(role)
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def kill(self, role: str) -> None:
        self._processes[role].kill()
        self._processes[role].join()
        self.kills[role] += 1
        self._start(role)
        if role == "controller" and not self._processes["trainer"].is_alive():
            self._start("trainer")  # a job that is resumed has all of its roles

    @property
    def is_going_on(self) -> bool:
        """Whether trainer and controller have work to do. Neither may have failed."""
        both = [self._processes["trainer"], self._processes["controller"]]
        assert all(process.exitcode in (None, 0) for process in both), self.logs()
        return any(process.is_alive() for process in both)

    def wait(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.is_going_on:
            assert time.monotonic() < deadline, f"not in time:\n{self.logs()}"
            time.sleep(0.05)

    def logs(self) -> str:
        paths = sorted(self.folder.root.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in paths)

    def _start(self, role: str) -> None:
        target, arguments = self._roles[role]
        self._processes[role] = _CONTEXT.Process(target=target, args=arguments, daemon=True)
        self._processes[role].start()


def finish(root: Path, *, num_kills: int, num_steps: int, seed: int) -> Run:
    """A run of so many steps, undisturbed once so many of its processes have been killed."""
    rng = random.Random(seed)
    with Run(root, num_steps) as run:
        while run.kills.total() < num_kills and run.is_going_on:
            time.sleep(rng.uniform(0.0, 0.4))
            run.kill(rng.choice(["engine-0", "engine-1", "verifier", "trainer", "controller"]))
        run.wait()
    run.folder.mark_finished(Stage.RL)
    return run


def trained_of(run: Run, below: int) -> Counter[int]:
    """How often each of the first groups was trained, as the trainer's last weights say; an audit
    says the same, and finds nothing wrong."""
    report = audit_run(run.folder)
    assert report.findings == (), [str(finding) for finding in report.findings]
    folder = CheckpointFolder(run.folder.checkpoints(Stage.RL))
    trained = Counter(o for batch in chaos.weights(folder, folder.latest()) for o in batch)
    assert trained == Counter(row.ordinal for row in report.rows if row.fate is Fate.TRAINED)
    return Counter({ordinal: count for ordinal, count in trained.items() if ordinal < below})


def disturb_and_compare(tmp_path: Path, num_kills: int, num_steps: int, seed: int) -> None:
    quiet = finish(tmp_path / "quiet", num_kills=0, num_steps=num_steps, seed=seed)
    chaotic = finish(tmp_path / "chaos", num_kills=num_kills, num_steps=num_steps, seed=seed)
    assert chaotic.kills.total() == num_kills
    # All but the last groups, which may be in flight when the run ends, are trained or dropped.
    num_outstanding = (16 + 8) // 4
    below = 2 * num_steps - num_outstanding
    trained = trained_of(chaotic, below)
    assert trained == trained_of(quiet, below)
    assert set(trained.values()) == {1} and len(trained) > below / 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("quiet", "chaos"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_what_is_trained_does_not_depend_on_what_was_killed(folder):
    disturb_and_compare(folder, num_kills=20, num_steps=60, seed=0)


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_either(folder):
    disturb_and_compare(folder, num_kills=100, num_steps=300, seed=1)
