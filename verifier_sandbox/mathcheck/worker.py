"""A worker process: reads one job a line, answers one result a line, until its input ends.

It confines itself before it reads a job: memory, no file of more than 0 bytes, no core dump, and a
seccomp filter that leaves it computing and its two pipes, so it cannot open a file at all. It sets
no timer: the parent owns the deadline and kills.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from typing import TextIO

from verifier_sandbox.jail import policies, seccomp

from . import checker, fallback
from .result import MathResult, MathVerdict

READY = "ready"
"""First word of a confined worker."""
UNCONFINED = "unconfined"
"""First word where the machine has no seccomp filters."""

# One pair of each kind, so that whatever Python loads late is loaded before files are out of reach.
_WARM_UP = (
    (r"\frac{1}{2}", "0.5"),
    (r"\sqrt{2}+\pi", r"\sin x + e^{i} + \ln 2"),
    (r"x^2+1>0", r"(-\infty, \infty)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\sum_{k=1}^{n} k!"),
    (r"5\text{ km/h}", "答案是 ⅓，٣"),
)


def main(memory_mib: int, with_sympy: bool) -> None:
    """Run the worker on standard input and output."""
    if with_sympy:
        fallback.load()
    for reference, response_text in _WARM_UP:
        checker.check(reference, response_text)
    limit_resources(memory_mib)
    is_confined = seccomp.is_available()
    if is_confined:
        seccomp.install(policies.CPP_STATIC)
    gc.freeze()  # what is loaded by now never becomes garbage
    serve(sys.stdin, sys.stdout, READY if is_confined else UNCONFINED)


def serve(jobs: TextIO, results: TextIO, greeting: str = READY) -> None:
    """Answer jobs (`[reference, response]`) by `[verdict, reason]` until EOF."""
    _send(results, [greeting, ""])
    for line in jobs:
        reference, response_text = json.loads(line)
        result = answer(reference, response_text)
        _send(results, [result.verdict.value, result.reason])


def answer(reference: str, response_text: str) -> MathResult:
    """One check; whatever goes wrong becomes a result, because this is the worker's edge."""
    try:
        return checker.check(reference, response_text)
    except MemoryError:
        return MathResult(MathVerdict.TOO_BIG, "out of memory")
    except Exception as error:  # the worker's edge: a fault of ours becomes a counted verdict
        return MathResult(MathVerdict.INTERNAL, f"{type(error).__name__}: {error}"[:200])


def limit_resources(memory_mib: int) -> None:
    """Bound this process for good: RLIMIT_AS, no writable file, no core dump."""
    memory = memory_mib * 1024 * 1024
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)  # a container may have set a lower one: never raise it
        resource.setrlimit(kind, (limit, limit))


def _send(results: TextIO, message: list[object]) -> None:
    results.write(json.dumps(message) + "\n")
    results.flush()
