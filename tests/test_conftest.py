"""How a test run ends that is told to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli_runs import ROOT

TESTS = """
import os, pathlib, signal, pytest

@pytest.fixture
def server():
    yield
    pathlib.Path("torn_down").touch()

def test_it(server):
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""


def test_sigterm_tears_down_what_fixtures_have_started(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "/dev/null", "test_it.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (tmp_path / "torn_down").exists(), done.stdout + done.stderr
    assert "KeyboardInterrupt" in done.stdout
