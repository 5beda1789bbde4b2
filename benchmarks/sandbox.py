"""What the sandbox costs: `magistral bench sandbox`.

Ratios in CPU time, measured in one run on one machine, because wall times of a shared machine say
little; of many short interleaved rounds the cheapest counts. The baselines do the same work: the
same static binary spawned bare, the same source under a cold `python -I -S`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verifier_sandbox.jail.build import BASE_FLAGS
from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.launcher import Launcher
from verifier_sandbox.jail.wire import Compare, Profile, ProgramLimits, Span, TestSpans
from verifier_sandbox.protocol import JudgeRequest, Language, Test
from verifier_sandbox.service import Service, running

SUM_CPP = """#include <bits/stdc++.h>
using namespace std;
int main() { long long a, b; cin >> a >> b; cout << a + b << endl; }
"""
SUM_PY = "a, b = map(int, input().split())\nprint(a + b)\n"
_INPUT, _EXPECTED = b"3 4\n", b"7\n"
# Many short rounds, of which the cheapest counts: others on the machine only ever add.
_NUM_ROUNDS, _NUM_RUNS = 15, 30
_NUM_SERVICE_ROUNDS, _NUM_SUBMISSIONS, _NUM_TESTS = 5, 8, 20


# A small parent, as the launcher is: a child of a large one pays for it.
_SPAWNER = r"""
#define _GNU_SOURCE
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static double cpu_s(int who)
{
    struct rusage u;
    getrusage(who, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

int main(int argc, char **argv)
{
    int input = memfd_create("input", 0), output = memfd_create("output", 0), status;
    char *environment[] = {NULL};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, input, 0);
    posix_spawn_file_actions_adddup2(&actions, output, 1);
    if (write(input, argv[1], strlen(argv[1])) < 0)
        return 1;
    for (int i = 0; i < atoi(argv[2]); i++) {
        pid_t pid;
        lseek(input, 0, SEEK_SET);
        if (ftruncate(output, 0) || lseek(output, 0, SEEK_SET) ||
            posix_spawn(&pid, argv[3], &actions, NULL, argv + 3, environment) ||
            waitpid(pid, &status, 0) != pid || status)
            return 1;
    }
    printf("%f", cpu_s(RUSAGE_SELF) + cpu_s(RUSAGE_CHILDREN));
}
"""


@dataclass(frozen=True)
class Row:
    """One line of the table; `target` bounds the ratio from above, or from below if `at_least`."""

    what: str
    ours: str
    baseline: str
    ratio: float
    target: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


def main() -> None:
    """Measures and prints; exit status 1 if a target is missed."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows, facts = asyncio.run(_measure())
    table = Table("what", "ours", "baseline", "ratio", "target", title="CPU time")
    for row in rows:
        sign = ">=" if row.at_least else "<="
        mark = "" if row.is_met else "  missed"
        target = f"{sign} {row.target:g}{mark}"
        table.add_row(row.what, row.ours, row.baseline, f"{row.ratio:.2f}", target)
    console = Console()
    console.print(table)
    for fact in facts:
        console.print(fact, highlight=False)
    sys.exit(0 if all(row.is_met for row in rows) else 1)


async def _measure() -> tuple[list[Row], list[str]]:
    async with running() as service:
        binary = await _binary(service)
        rows = [
            await _cpp_row(service, binary),
            await _python_row(service),
            await _overhead_row(service, Language.CPP, SUM_CPP),
            await _overhead_row(service, Language.PYTHON, SUM_PY),
            _header_row(service),
        ]
        facts = [
            await _throughput(service, Language.CPP, SUM_CPP),
            await _throughput(service, Language.PYTHON, SUM_PY),
        ]
    return rows, facts


async def _binary(service: Service) -> SealedFile:
    await service.judge.judge(_request(Language.CPP, SUM_CPP))
    compilation = service.judge.cache.get(SUM_CPP)
    assert compilation is not None
    assert compilation.binary is not None
    return compilation.binary


def _request(language: Language, source: str) -> JudgeRequest:
    tests = [Test(f"{i} {i}\n", f"{2 * i}\n") for i in range(_NUM_TESTS)]
    return JudgeRequest(
        language=language, source=source, tests=tests, problem_id="bench", group="bench"
    )


async def _cpp_row(service: Service, binary: SealedFile) -> Row:
    profile = Profile.CPP_STATIC if service.jail.toolchain.is_static else Profile.CPP_DYNAMIC
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "solution"
        path.write_bytes(os.pread(binary.fd, binary.size, 0))
        path.chmod(0o755)
        spawner = _build_spawner(directory)
        for _ in range(_NUM_ROUNDS):  # interleaved: both meet the same machine
            ours.append(await _sandboxed_ms(service, profile, binary))
            bare.append(_bare_ms(spawner, [str(path)]))
    return _ratio_row("C++ test / bare spawn of the same binary", ours, bare, 1.25)


async def _python_row(service: Service) -> Row:
    assert service.jail.interpreter is not None
    interpreter = str(service.jail.interpreter.executable)
    ours, cold = [], []
    with tempfile.TemporaryDirectory() as directory, SealedFile([SUM_PY.encode()]) as source:
        path = Path(directory) / "solution.py"
        path.write_text(SUM_PY)
        spawner = _build_spawner(directory)
        for _ in range(_NUM_ROUNDS):
            ours.append(await _sandboxed_ms(service, Profile.PYTHON, source))
            cold.append(_bare_ms(spawner, [interpreter, "-I", "-S", str(path)]))
    return _ratio_row("Python test / cold python -I -S", ours, cold, 0.5)


async def _sandboxed_ms(service: Service, profile: Profile, program: SealedFile) -> float:
    """CPU of one test, all in: launcher, zygote and program."""
    limits = ProgramLimits(profile, 4 * 10**9, 4 * 10**9, 120 * 10**9, 300 << 20, 16 << 20)
    test = TestSpans(Span(0, len(_INPUT)), Span(len(_INPUT), len(_EXPECTED)))
    with SealedFile([_INPUT, _EXPECTED]) as blob:
        async with service.pool.slot() as slot:

            async def run(count: int) -> int:
                programs = [(limits, program.fd)]
                tests = [test] * count
                done = await slot.launcher.run(programs, blob.fd, tests, Compare.TRIMMED, 600)
                assert all(run.matched for (run,) in done)
                return sum(run.cpu_ns for (run,) in done)

            await run(1)  # starts the zygote
            before = _launcher_cpu_ms(slot.launcher)
            programs_ns = await run(_NUM_RUNS)
            spent_ms = _launcher_cpu_ms(slot.launcher) - before
    return (programs_ns / 1e6 + spent_ms) / _NUM_RUNS


def _launcher_cpu_ms(launcher: Launcher) -> float:
    """CPU so far of the launcher and its zygote, without their children's."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return sum(_process_cpu_ms(pid) for pid in (launcher.pid, *map(int, children)))


def _process_cpu_ms(pid: int) -> float:
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e6


def _bare_ms(spawner: str, command: list[str]) -> float:
    """CPU of one bare run: the program's, and its parent's for starting and reaping it."""
    arguments = [spawner, _INPUT.decode(), str(_NUM_RUNS), *command]
    answer = subprocess.run(arguments, check=True, capture_output=True, timeout=600)
    return float(answer.stdout) * 1e3 / _NUM_RUNS


def _build_spawner(directory: str) -> str:
    source, program = Path(directory) / "spawner.c", str(Path(directory) / "spawner")
    source.write_text(_SPAWNER)
    subprocess.run(["gcc", "-O2", str(source), "-o", program], check=True, timeout=600)
    return program


def _ratio_row(what: str, ours: list[float], baseline: list[float], target: float) -> Row:
    a, b = min(ours), min(baseline)
    return Row(what, f"{a:.3f} ms", f"{b:.3f} ms", a / b, target)


async def _overhead_row(service: Service, language: Language, source: str) -> Row:
    """CPU of the service process for whole submissions over that of their tests."""
    request = _request(language, source).model_dump_json().encode()
    await service.judge.judge(JudgeRequest.model_validate_json(request))
    ratios = []
    for _ in range(_NUM_SERVICE_ROUNDS):
        before, tests_ms = time.process_time(), 0.0
        for _ in range(_NUM_SUBMISSIONS):
            result = await service.judge.judge(JudgeRequest.model_validate_json(request))
            result.model_dump_json()
            tests_ms += sum(test.cpu_ms for test in result.per_test)
        ratios.append((1e3 * (time.process_time() - before), tests_ms))
    ratio = statistics.median(a / b for a, b in ratios)
    ours, tests = (
        statistics.median(column) / _NUM_SUBMISSIONS for column in zip(*ratios, strict=True)
    )
    what = f"service / its {_NUM_TESTS} {language.value} tests"
    return Row(what, f"{ours:.2f} ms", f"{tests:.2f} ms", ratio, 0.15)


def _header_row(service: Service) -> Row:
    """Hello world, compiled to an object with and without the precompiled header."""
    toolchain = service.jail.toolchain
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "hello.cpp"
        path.write_text('#include <bits/stdc++.h>\nint main() { std::cout << "hello"; }\n')

        def compile_ms(*flags: str) -> float:
            command = [str(toolchain.compiler), *BASE_FLAGS, *flags, *toolchain.link_flags]
            return _children_ms([*command, str(path), "-o", f"{directory}/hello"])

        rounds = [(compile_ms(), compile_ms(f"-I{toolchain.header_directory}")) for _ in range(3)]
    ratio = statistics.median(without / with_ for without, with_ in rounds)
    without, with_ = (statistics.median(column) for column in zip(*rounds, strict=True))
    what = "compiling hello world without / with the precompiled header"
    return Row(what, f"{with_:.0f} ms", f"{without:.0f} ms", ratio, 3.0, at_least=True)


def _children_ms(command: list[str]) -> float:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run(command, check=True, timeout=600)
    return 1e3 * (used() - before)


async def _throughput(service: Service, language: Language, source: str) -> str:
    count = 4 * _NUM_SUBMISSIONS
    begin = time.monotonic()
    await asyncio.gather(*(service.judge.judge(_request(language, source)) for _ in range(count)))
    wall_s = time.monotonic() - begin
    slots = service.pool.num_slots
    return (
        f"{language.value}: {count * _NUM_TESTS / wall_s:.0f} tests/s, "
        f"{count / wall_s:.1f} submissions/s of {_NUM_TESTS} tests (wall, {slots} slots, compiled)"
    )


if __name__ == "__main__":
    main()
