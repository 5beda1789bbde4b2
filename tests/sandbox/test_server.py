"""The service as a process: its wire, its end, and what it leaves behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.sandbox.conftest import request
from verifier_sandbox.client import VerifierClient
from verifier_sandbox.jail.bpf import Action, assemble
from verifier_sandbox.jail.machine import INTERPRETER_VARIABLE
from verifier_sandbox.jail.syscalls import SYSCALLS
from verifier_sandbox.protocol import Verdict

pytestmark = pytest.mark.sandbox
START_S = 120
SPIN = "while True: pass"


MODULE = ("-m", "verifier_sandbox")


@contextmanager
def serving(path, *options, entry=MODULE):
    command = [sys.executable, *entry, "serve", "--socket", str(path), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    http = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60)
    try:
        end = time.monotonic() + START_S
        while not path.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        yield process, http
    finally:
        http.close()
        process.kill()
        process.wait(30)
        process.stderr.close()


def post(http, **changes):
    body = request(**changes).model_dump_json()
    return http.post("http://verifier/v1/judge", content=body)


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found, todo = set(), [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found |= set(below)
        todo += below
    return found


def still_alive(pids: set[int], patience_s: float = 20) -> set[int]:
    end = time.monotonic() + patience_s
    while (alive := {pid for pid in pids if is_running(pid)}) and time.monotonic() < end:
        time.sleep(0.05)
    return alive


def is_running(pid: int) -> bool:
    """Not a zombie: orphans are init's to reap, in its own time."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_wire(tmp_path):
    with serving(tmp_path / "s.sock", "--num-slots", "1") as (process, http):
        health = http.get("http://verifier/healthz").json()
        assert health["status"] == "ok"
        assert health["num_slots"] == 1
        answer = post(http, source="print('safe')")
        assert answer.json()["verdict"] == "ok"
        assert answer.json()["per_test"][0]["cpu_ms"] > 0
        for body in (b"{}", b"not json", b'{"language": "cobol"}'):
            assert http.post("http://verifier/v1/judge", content=body).status_code == 422
        huge = post(
            http,
            source="def f(x): return 10**400",
            tests=[("[1]", "1.5")],
            function_name="f",
            checker="floats",
        )
        assert (huge.status_code, huge.json()["verdict"]) == (200, "wrong_answer")
        bad = post(http, source="x", tests=[("no json", "1")], function_name="f")
        assert (bad.status_code, "JSON" in bad.json()["detail"]) == (422, True)
        body = json.dumps({"reference": "1/2", "response": r"so \boxed{0.5}"})
        maths = http.post("http://verifier/v1/maths", content=body)
        assert maths.json()["verdict"] == "correct"
        metrics = http.get("http://verifier/metrics").text
        assert 'verifier_submissions_total{language="python",verdict="ok"} 1.0' in metrics
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        log = process.stderr.read()
    record = json.loads(
        next(line for line in log.splitlines() if "judged" in line).split(" ", 4)[4]
    )
    assert (record["verdict"], record["problem_id"]) == ("ok", "problem")


# As a program does that has a command line of its own around this one.
_QUIET = """
import logging
logging.basicConfig(level=logging.WARNING)
from verifier_sandbox.cli import app
app()
"""


def test_the_log_is_written_whatever_log_the_program_around_keeps(tmp_path):
    with serving(tmp_path / "s.sock", "--num-slots", "1", entry=("-c", _QUIET)) as (process, http):
        assert post(http, source="print('safe')").json()["verdict"] == "ok"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        log = process.stderr.read()
    assert log.count("isolation: ") == 1
    assert log.count('"event": "judged"') == 1


def test_duplicates_that_wait_for_one_compilation_count_as_waiting(tmp_path):
    source = '#include <bits/stdc++.h>\nint main() { puts("safe"); }'
    body = request(source, language="cpp").model_dump_json()
    path = tmp_path / "s.sock"

    async def ask_all():
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, timeout=120) as http:
            jobs = [http.post("http://verifier/v1/judge", content=body) for _ in range(10)]
            return [answer.status_code for answer in await asyncio.gather(*jobs)]

    with serving(path, "--num-slots", "1", "--max-queue", "2"):
        statuses = asyncio.run(ask_all())
    assert sorted(statuses) == [200] * 3 + [429] * 7


def test_only_its_owner_can_connect_to_the_socket(tmp_path):
    path = tmp_path / "s.sock"
    with serving(path, "--num-slots", "1") as (process, _):
        assert path.stat().st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_a_killed_service_left_is_replaced(tmp_path):
    path = tmp_path / "s.sock"
    with serving(path, "--num-slots", "1") as (process, _):
        process.kill()
        process.wait(60)
    left = path.stat().st_ino
    with serving(path, "--num-slots", "1") as (_, http):
        end = time.monotonic() + START_S
        while path.stat().st_ino == left and time.monotonic() < end:
            time.sleep(0.05)
        assert http.get("http://verifier/healthz").status_code == 200


def test_full_queue_answers_429_and_the_client_waits(tmp_path):
    path = tmp_path / "s.sock"
    with serving(path, "--num-slots", "1", "--max-queue", "1") as (_, http):

        async def main():
            client = VerifierClient([f"unix:{path}"], timeout_s=120)
            jobs = [client.judge(request(f"print('safe') #{i}")) for i in range(6)]
            results = await asyncio.gather(*jobs)
            await client.close()
            return results

        results = asyncio.run(main())
        metrics = http.get("http://verifier/metrics").text
    assert [result.verdict for result in results] == [Verdict.OK] * 6
    rejected = next(li for li in metrics.splitlines() if li.startswith("verifier_rejected_total"))
    assert float(rejected.split()[1]) > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_service(tmp_path, number):
    with serving(tmp_path / "s.sock", "--num-slots", "2") as (process, http):
        assert http.get("http://verifier/healthz").status_code == 200
        spinning = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _POST,
                str(tmp_path / "s.sock"),
                request(SPIN).model_dump_json(),
            ],
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while len(below := descendants(process.pid)) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(below) >= 4  # two launchers, a maths worker, a zygote, a program
        process.send_signal(number)
        process.wait(60)
        assert still_alive(below) == set()
        spinning.wait(60)


_POST = """
import sys, httpx
http = httpx.Client(transport=httpx.HTTPTransport(uds=sys.argv[1]), timeout=60)
http.post("http://verifier/v1/judge", content=sys.argv[2])
"""


def test_service_ends_with_its_parent(tmp_path):
    path = tmp_path / "s.sock"
    script = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'verifier_sandbox', 'serve', '--socket',"
        " sys.argv[1], '--num-slots', '1'])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    pid = int(parent.stdout.readline())
    end = time.monotonic() + START_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    everyone = {pid} | descendants(pid)
    parent.kill()
    parent.wait(30)
    parent.stdout.close()
    assert still_alive(everyone, 60) == set()


# What a container runtime's default profile refuses, with what it answers.
_CONTAINER = {
    **{
        SYSCALLS[name]: Action.EPERM
        for name in (
            "mount", "umount2", "unshare", "setns", "pivot_root", "keyctl", "add_key", "bpf",
            "perf_event_open", "userfaultfd", "io_uring_setup", "kexec_load", "init_module",
            "process_vm_readv", "open_by_handle_at", "fsopen", "move_mount", "quotactl", "acct",
        )
    },
    SYSCALLS["clone3"]: Action.ENOSYS,
}  # fmt: skip

_UNDER_FILTER = """
import ctypes, sys
from verifier_sandbox.jail import seccomp
class Container:
    name = "container"
    def filter_bytes(self): return bytes.fromhex(sys.argv.pop(1))
seccomp.install(Container())
from verifier_sandbox.cli import app
app()
"""


def test_judges_under_the_filter_of_a_container_runtime(tmp_path):
    (tmp_path / "1.in").write_text("3 4")
    (tmp_path / "1.out").write_text("7")
    program = tmp_path / "sum.cpp"
    program.write_text(
        '#include <cstdio>\nint main(){int a,b;scanf("%d %d",&a,&b);printf("%d",a+b);}'
    )
    code = assemble(_CONTAINER, Action.ALLOW).hex()
    command = [sys.executable, "-c", _UNDER_FILTER, code, "run", str(program)]
    answer = subprocess.run(
        [*command, "--tests", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "1 of 1 tests passed" in answer.stdout


def test_refuses_to_start_without_seccomp(tmp_path):
    blocked = assemble({SYSCALLS["seccomp"]: Action.EPERM}, Action.ALLOW).hex()
    command = [
        sys.executable,
        "-c",
        _UNDER_FILTER,
        blocked,
        "serve",
        "--socket",
        str(tmp_path / "s"),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode != 0
    assert "refusing to run hostile code" in answer.stderr


def test_names_the_interpreters_that_it_tried(tmp_path):
    environment = {**os.environ, INTERPRETER_VARIABLE: "/bin/false"}
    command = [sys.executable, "-m", "verifier_sandbox", "serve", "--socket", str(tmp_path / "s")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert answer.returncode != 0
    assert INTERPRETER_VARIABLE in answer.stderr
