"""The supervisor with real processes."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_magistral import cluster
from megatron_magistral.cluster import (
    RestartPolicy,
    Role,
    RoleFailed,
    StageTimeout,
    Supervisor,
    free_ports,
    tail,
)
from megatron_magistral.restart_requests import RestartRequest, RestartRequests


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


# --- restarts ---------------------------------------------------------------------------------

SLEEPS = "import os, time; print(os.getpid()); time.sleep(120)"


def restartable(tmp_path: Path, name: str, code: str, max_restarts: int, pool: str = "") -> Role:
    policy = RestartPolicy(max_restarts, backoff_s=0.05, pool=pool)
    return replace(role(tmp_path, name, code), restarts=policy, address=f"{name}:1")


def pids(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


class Seen(Exception):
    """What was waited for has been seen."""


def supervise_until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    """Supervise processes of which none ends by itself, until `condition` holds."""

    def tick() -> None:
        if condition():
            raise Seen

    with pytest.raises(Seen):
        supervisor.wait_for(["work"], tick=tick, tick_s=0.02, timeout_s=60)


def after_some_starts(log: Path, number: int) -> str:
    """Code that fails at its first starts, ends well at start `number`, and writes a line each."""
    return (
        "from pathlib import Path\n"
        f"log = Path({str(log)!r})\n"
        "log.open('a').write('x')\n"
        f"raise SystemExit(len(log.read_text()) < {number})"
    )


def test_a_role_that_fails_is_started_anew_and_each_restart_is_told(tmp_path):
    told: list[str] = []
    code = after_some_starts(tmp_path / "starts", 3)
    with Supervisor(grace_s=5, say=told.append) as supervisor:
        supervisor.start(restartable(tmp_path, "shaky", code, max_restarts=2))
        supervisor.wait_for(["shaky"], tick_s=0.02, timeout_s=30)
        assert supervisor.num_restarts == {"shaky": 2}
    assert len(told) == 2
    why = r"shaky ended with exit code 1 after \d+ s"
    assert re.match(rf"{why}; restart 1 of 2 in 0.05 s; see .*shaky.log", told[0])
    assert re.match(rf"{why}; restart 2 of 2 in 0.1 s; see .*shaky.log", told[1])


def test_a_role_that_fails_beyond_its_restarts_ends_the_run(tmp_path):
    with (
        Supervisor(grace_s=5, say=lambda line: None) as supervisor,
        pytest.raises(RoleFailed, match=r"(?s)broken ended .* after 2 restarts; .*words.*words"),
    ):
        code = "print('words'); raise SystemExit(1)"
        supervisor.start(restartable(tmp_path, "broken", code, max_restarts=2))
        supervisor.wait_for(["broken"], tick_s=0.02, timeout_s=30)


def test_the_run_goes_on_while_one_of_a_pool_is_left_and_ends_with_the_last(tmp_path):
    told: list[str] = []
    with Supervisor(grace_s=5, say=told.append) as supervisor:
        for name in ("a", "b"):
            supervisor.start(restartable(tmp_path, name, SLEEPS, max_restarts=0, pool="engines"))
        supervisor.start(role(tmp_path, "work", SLEEPS))
        wait_until(lambda: all(pids(tmp_path / f"{name}.log") for name in ("a", "b")))

        def kill(name: str) -> None:
            os.kill(pids(tmp_path / f"{name}.log")[-1], signal.SIGKILL)

        kill("a")
        supervise_until(supervisor, lambda: bool(told))
        assert "a was killed by SIGKILL after" in told[0] and "goes on with b" in told[0]
        kill("b")
        with pytest.raises(RoleFailed, match="b was killed by SIGKILL"):
            supervisor.wait_for(["work"], tick_s=0.02, timeout_s=30)


def test_what_a_dead_role_had_started_is_gone_before_its_successor_starts(tmp_path):
    log = tmp_path / "parent.log"
    code = (
        "import os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        f"before = Path({str(log)!r}).read_text().split()\n"
        "alive = [pid for pid in before if Path(f'/proc/{pid}').exists()\n"
        "         and ') Z' not in Path(f'/proc/{pid}/stat').read_text()]\n"
        "if before: print('alive', alive); raise SystemExit(0)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\n"
        "os._exit(1)\n"
    )
    with Supervisor(grace_s=5, say=lambda line: None) as supervisor:
        supervisor.start(restartable(tmp_path, "parent", code, max_restarts=1))
        supervisor.wait_for(["parent"], tick_s=0.02, timeout_s=30)
    assert log.read_text().splitlines()[1] == "alive []"


def test_a_process_that_hangs_is_replaced_on_request(tmp_path):
    told: list[str] = []
    requests = RestartRequests(tmp_path / "restarts")
    log = tmp_path / "hangs.log"
    with Supervisor(grace_s=5, requests=requests, say=told.append) as supervisor:
        supervisor.start(restartable(tmp_path, "hangs", SLEEPS, max_restarts=1))
        wait_until(lambda: pids(log))
        os.kill(pids(log)[0], signal.SIGSTOP)
        requests.ask(RestartRequest("hangs:1", silent_since=time.time(), why="does not answer"))
        supervisor.start(role(tmp_path, "work", SLEEPS))
        supervise_until(supervisor, lambda: len(pids(log)) == 2)
        assert gone(pids(log)[0])
    assert len(told) == 1
    assert "hangs was asked to be restarted, as it does not answer, after" in told[0]


def test_a_request_about_the_process_before_leaves_its_successor_alone(tmp_path):
    requests = RestartRequests(tmp_path / "restarts")
    asked = time.time()
    with Supervisor(grace_s=5, requests=requests) as supervisor:
        supervisor.start(restartable(tmp_path, "new", SLEEPS, max_restarts=1))
        requests.ask(RestartRequest("new:1", silent_since=asked, why="did not answer"))
        with pytest.raises(StageTimeout):
            supervisor.wait_for(["new"], tick_s=0.02, timeout_s=0.5)
        assert supervisor.num_restarts == {}
        assert requests.take("new:1") is None


# --- ports --------------------------------------------------------------------------------------


def test_ports_for_later_are_not_those_that_connections_take():
    first, last = map(int, cluster.EPHEMERAL_PORTS.read_text().split())
    ports = free_ports(50)
    assert len(set(ports)) == 50
    if first - cluster.FIRST_PORT >= cluster.MIN_CHOICE:
        assert not any(first <= port <= last for port in ports)


def test_ports_for_later_are_not_those_that_sglang_takes_for_its_ranks():
    """By its own source: to import it takes as long as to start a server."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "srt/utils/network.py").read_text()
    drawn = re.search(r"def get_free_port_below_ephemeral\(low=(\d+), high=(\d+)", source)
    assert drawn is not None
    assert range(int(drawn[1]), int(drawn[2]) + 1) == cluster.SGLANG_PORTS
    assert not set(free_ports(50)) & set(cluster.SGLANG_PORTS)


def test_a_port_that_somebody_listens_on_is_not_given(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(cluster, "_lasting_ports", lambda: range(port, port + 1))
        with pytest.raises(OSError, match=r"127\.0\.0\.1 has 0 of 1 free ports"):
            free_ports(1)
    assert free_ports(1) == [port]


def test_where_connections_may_take_nearly_every_port_all_are_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "EPHEMERAL_PORTS", tmp_path / "absent")
    assert cluster._lasting_ports() == [*range(12000, 22000), *range(30000, 32768)]
    (tmp_path / "wide").write_text("1024\t65535\n")
    monkeypatch.setattr(cluster, "EPHEMERAL_PORTS", tmp_path / "wide")
    assert cluster._lasting_ports() == list(range(12000, 65536))
