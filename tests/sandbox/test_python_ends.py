"""A Python program prints in the jail what it prints under a plain interpreter, to its very end.

The jail's children are forked from a warm interpreter and do not end as one does; what an
interpreter does at its end they must do too.
"""

import subprocess

import pytest

from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.wire import Compare, Outcome, Profile, Span, TestSpans
from verifier_sandbox.judge.job import program_limits
from verifier_sandbox.protocol import Limits

pytestmark = pytest.mark.sandbox

PROGRAMS = {
    "closed": "import sys\nprint(1, flush=True)\nsys.stdout.close()",
    "no stdout": "import sys\nprint(1, flush=True)\nsys.stdout = None",
    "opened by number": "out = open(1, 'w')\nout.write('1')",
    "fdopen": "import os\nout = os.fdopen(1, 'w', 1 << 16)\nprint(1, file=out)\nprint(2)",
    "replaced": "import sys\nsys.stdout = open(1, 'w')\nprint(1)",
    "kept aside": "import io, sys\nout, sys.stdout = sys.stdout, io.StringIO()\nout.write('1')",
    "binary": "import sys\nsys.stdout.buffer.write(b'1')",
    "in another module": "import json\njson.kept = [open(1, 'w')]\njson.kept[0].write('1')",
    "finalizer": "class A:\n    def __del__(self): print(1)\na = A()",
    "cycle": "class A:\n    def __del__(self): print(1)\na = A()\na.a = a",
    "generator": "def g():\n    try: yield\n    finally: print(1)\nx = g()\nnext(x)\nprint(2)",
    "weakref": "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 1)",
    "exit handlers": "import atexit\natexit.register(print, 1)\natexit.register(print, 2)",
    "failing exit handler": "import atexit\natexit.register(print, 1)\natexit.register(int, 'x')",
    "thread": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.05), print(1))).start()\nprint(2)",
    "uncaught": "print(1)\n1 / 0",
    "uncaught with a writer": "out = open(1, 'w')\nout.write('1')\n1 / 0",
    "hook": "import sys\nsys.excepthook = lambda *a: print(1)\n1 / 0",
    "hook that exits": "import sys\nsys.excepthook = lambda *a: sys.exit(0)\nprint(1)\n1 / 0",
    "exit in a function": "def f():\n    out = open(1, 'w')\n    out.write('1')\n    exit(3)\nf()",
    "exit by a message": "print(1)\nraise SystemExit('no')",
    "exit by a large number": "print(1)\nraise SystemExit(1 << 70)",
    "exit by a false int": "class I(int):\n    def __and__(self, o): return 0\n"
    "raise SystemExit(I(1))",
    "failing flush": "import os, sys\nprint(1)\nos.close(1)",
    "C library": "import ctypes\nctypes.CDLL(None).printf(b'1')",
    "streams": "import sys\n"
    "print([(s.name, s.mode, s.encoding, s.errors) for s in (sys.stdin, sys.__stdout__)])",
    "deepest recursion": "def f(n):\n    try: return f(n + 1)\n"
    "    except RecursionError: return n\nprint(f(0))",
}


@pytest.fixture(scope="module")
def run_in_jail(bench):
    """(source) -> (exit status, output)."""

    async def run(source: str) -> tuple[int, bytes]:
        limits = program_limits(Profile.PYTHON, Limits(), under_pressure=True)
        async with bench.service.pool.slot() as slot:
            with SealedFile([source.encode()]) as file, SealedFile([b""]) as blob:
                tests, programs = [TestSpans(Span(0, 0))], [(limits, file.fd)]
                answer = await slot.launcher.run(programs, blob.fd, tests, Compare.NEVER, 120)
            end = answer[0][0]
            assert end.outcome is Outcome.EXITED
            return end.code, slot.launcher.output(1 << 16)

    return lambda source: bench.await_(run(source))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_as_under_a_plain_interpreter(bench, run_in_jail, tmp_path, name):
    path = tmp_path / "solution.py"
    path.write_text(PROGRAMS[name])
    command = [bench.service.jail.interpreter.executable, "-E", "-s", "-X", "utf8", path]
    plain = subprocess.run(command, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    assert run_in_jail(PROGRAMS[name]) == (plain.returncode, plain.stdout)
