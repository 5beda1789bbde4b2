"""Ask math-verify for a second opinion, in a process of its own, for audits and benchmarks only.

It is never part of a reward: it would turn wrong answers into right ones. It may live in another
environment, because it pins its own parser runtime.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

# The arguments in the order it documents (gold first), the prediction in a box as it expects.
_SCRIPT = r"""
import json, sys, time
from math_verify import parse, verify
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    gold, pred = json.loads(line)
    text = pred if "\\boxed" in pred or "\\fbox" in pred else "\\boxed{" + pred + "}"
    begin = time.process_time()
    try:
        match = bool(verify(parse("\\boxed{" + gold + "}"), parse(text)))
    except Exception:
        match = False
    print(json.dumps([match, time.process_time() - begin]), flush=True)
"""
_START_TIMEOUT_S = 120.0


class GraderMissing(RuntimeError):
    """The interpreter cannot import math-verify."""


@dataclass(frozen=True)
class Opinion:
    """What the second grader says, and the CPU time it took; None if it did not answer in time."""

    is_match: bool | None
    cpu_s: float


def second_opinions(
    pairs: Iterable[tuple[str, str]], python: str = sys.executable, timeout_s: float = 12.0
) -> list[Opinion]:
    """math-verify's verdict on each (reference, prediction). A hang costs `timeout_s` each.

    Raises GraderMissing if `python` cannot import it.
    """
    grader = _Grader(python)
    try:
        opinions = []
        for reference, prediction in pairs:
            opinion = grader.ask(reference, prediction, timeout_s)
            opinions.append(opinion)
            if opinion.is_match is None:
                grader.close()
                grader = _Grader(python)
        return opinions
    finally:
        grader.close()


class _Grader:
    def __init__(self, python: str) -> None:
        try:
            self._process = subprocess.Popen(
                [python, "-c", _SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
        except OSError as error:
            raise GraderMissing(f"{python} cannot be started: {error.strerror}") from None
        if self._receive(_START_TIMEOUT_S) != "ready":
            self.close()
            raise GraderMissing(f"{python} cannot import math_verify")

    def ask(self, reference: str, prediction: str, timeout_s: float) -> Opinion:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([reference, prediction]) + "\n")
        answer = self._receive(timeout_s)
        return Opinion(None, timeout_s) if answer is None else Opinion(*answer)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _receive(self, timeout_s: float):  # type: ignore[no-untyped-def]
        """The next answer, or None if there is none within the time."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        return json.loads(line) if line else None
