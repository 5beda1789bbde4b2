"""A run that is asked to end lets its trainers save first, within its bound."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megatron_magistral.cluster import Role, Supervisor, python_module
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.signals import Stopped
from megatron_magistral.stopping import saving_when_stopped

BOUND_S = 60.0
SAVES = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[1])
(run / "begun").touch()
while not (run / "stop_requested").exists():
    time.sleep(0.01)
(run / "saved").touch()
sys.exit(75)
"""
GOES_ON = """
import pathlib, sys, time
(pathlib.Path(sys.argv[1]) / "begun").touch()
time.sleep(600)
"""


def stop(folder: Path, script: str, *, grace_s: float, has_begun: bool = True) -> RunFolder:
    """A run with one trainer, which is asked to end once the trainer is there."""
    run = RunFolder(folder)
    (folder / "trainer.py").write_text(script)
    if has_begun:
        run.phase.write_text("reinforcement learning")
    command = (*python_module("trainer")[:1], str(folder / "trainer.py"), str(folder))
    trainer = Role("trainer-0", command, folder / "trainer.log", dict(os.environ))
    with (
        pytest.raises(Stopped),
        Supervisor(grace_s=1.0) as supervisor,
        saving_when_stopped(supervisor, run, grace_s),
    ):
        supervisor.start(trainer)
        deadline = time.monotonic() + BOUND_S
        while not (folder / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise Stopped(signal.SIGTERM)
    return run


def test_the_trainers_save_and_nothing_asks_the_next_run_to_stop(tmp_path):
    run = stop(tmp_path, SAVES, grace_s=BOUND_S)
    assert (tmp_path / "saved").exists()
    assert not run.stop_requested.exists()


def test_trainers_that_take_too_long_are_not_waited_for(tmp_path):
    run = stop(tmp_path, GOES_ON, grace_s=0.1)
    assert not run.stop_requested.exists()


@pytest.mark.parametrize("options", [{"grace_s": 0.0}, {"grace_s": BOUND_S, "has_begun": False}])
def test_a_run_that_has_nothing_to_save_ends_at_once(tmp_path, options):
    stop(tmp_path, SAVES, **options)
    assert not (tmp_path / "saved").exists()
