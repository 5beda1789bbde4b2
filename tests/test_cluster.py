"""The supervisor with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_magistral.cluster import Role, RoleFailed, StageTimeout, Supervisor, tail


def role(tmp_path: Path, name: str, code: str) -> Role:
    return Role(
        name, (sys.executable, "-u", "-c", code), tmp_path / f"{name}.log", dict(os.environ)
    )


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)


def test_waiting_ends_when_the_awaited_roles_have_ended(tmp_path):
    with Supervisor(grace_s=5) as supervisor:
        supervisor.start(role(tmp_path, "short", "print('done')"))
        supervisor.start(role(tmp_path, "service", "import time; time.sleep(60)"))
        supervisor.wait_for(["short"], timeout_s=30)
    assert (tmp_path / "short.log").read_text() == "done\n"


def test_a_role_that_fails_is_named_with_the_end_of_its_log(tmp_path):
    with (
        Supervisor(grace_s=5) as supervisor,
        pytest.raises(RoleFailed, match=r"(?s)broken ended with exit code 3 .*last words"),
    ):
        supervisor.start(role(tmp_path, "service", "import time; time.sleep(60)"))
        supervisor.start(role(tmp_path, "broken", "print('last words'); raise SystemExit(3)"))
        supervisor.wait_for(["service"], timeout_s=30)


def test_a_service_that_ends_by_itself_is_a_failure_even_with_exit_code_0(tmp_path):
    with Supervisor(grace_s=5) as supervisor, pytest.raises(RoleFailed, match="service ended"):
        supervisor.start(role(tmp_path, "service", "pass"))
        supervisor.start(role(tmp_path, "work", "import time; time.sleep(60)"))
        supervisor.wait_for(["work"], timeout_s=30)


def test_a_role_killed_by_a_signal_is_named_with_the_signal(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with Supervisor(grace_s=5) as supervisor, pytest.raises(RoleFailed, match="SIGKILL"):
        supervisor.start(role(tmp_path, "victim", code))
        supervisor.wait_for(["victim"], timeout_s=30)


def test_waiting_is_bounded(tmp_path):
    with Supervisor(grace_s=5) as supervisor, pytest.raises(StageTimeout, match="slow not done"):
        supervisor.start(role(tmp_path, "slow", "import time; time.sleep(60)"))
        supervisor.wait_for(["slow"], timeout_s=0.5)


def test_leaving_ends_grandchildren_and_those_that_ignore_sigterm(tmp_path):
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "stubborn.log"
    with Supervisor(grace_s=0.5) as supervisor:
        supervisor.start(role(tmp_path, "stubborn", code))
        wait_until(lambda: tail(log).isdigit())
    wait_until(lambda: gone(int(tail(log))))


def test_what_roles_started_ends_when_the_supervisor_is_killed(tmp_path):
    starts_another = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)']); "
        "print(child.pid); time.sleep(120)"
    )
    code = (
        "import time; from pathlib import Path\n"
        "from tests.test_cluster import role\n"
        "from megatron_magistral.cluster import Supervisor\n"
        f"Supervisor().start(role(Path({str(tmp_path)!r}), 'parent', {starts_another!r}))\n"
        "time.sleep(120)\n"
    )
    log = tmp_path / "parent.log"
    supervisor = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: log.exists() and tail(log).isdigit())
    grandchild = int(tail(log))
    assert not gone(grandchild)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait(10)
    wait_until(lambda: gone(grandchild))


def test_roles_end_when_the_supervisor_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.test_cluster import role\n"
        "from megatron_magistral.cluster import Supervisor\n"
        f"where = Path({str(tmp_path)!r})\n"
        "Supervisor().start(role(where, 'orphan', 'import os, time; print(os.getpid()); "
        "time.sleep(60)'))\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "orphan.log"
    supervisor = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: log.exists() and tail(log).isdigit())
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait(10)
    wait_until(lambda: gone(int(tail(log))))
