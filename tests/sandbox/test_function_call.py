"""Function problems: the submission is a module like any other."""

import pytest

from tests.sandbox.conftest import request
from verifier_sandbox.protocol import Verdict

pytestmark = pytest.mark.sandbox

MODULES = {
    "postponed annotations": "from __future__ import annotations\n"
    "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x): return P(x).x",
    "pickle": "import pickle\nclass P: pass\n"
    "def f(x):\n    p = P()\n    p.x = x\n    return pickle.loads(pickle.dumps(p)).x",
    "type hints": "from typing import NamedTuple, get_type_hints\nclass P(NamedTuple):\n"
    "    x: 'int'\ndef f(x): return P(x).x if get_type_hints(P) == {'x': int} else 0",
    "itself by name": "import sys\ny = 7\ndef f(x): return sys.modules[__name__].y",
    "its file": "def f(x): return 7 if __file__.endswith('.py') else 0",
    "not the program": "def f(x): return 0 if __name__ == '__main__' else 7",
    "recursion": "def d(n): return d(n - 1) + 1 if n else 0\ndef f(x): return d(996) - 989",
}


@pytest.mark.parametrize("name", MODULES)
def test_a_submission_is_a_module(bench, name):
    result = bench.judge(request(MODULES[name], [("[7]", "7")], function_name="f"))
    assert result.verdict is Verdict.OK, result.detail


SPY = """
import gc, sys
def f(x):
    seen = [vars(module) for module in list(sys.modules.values()) if module]
    frame = sys._getframe()
    while frame:
        seen.append(frame.f_locals)
        frame = frame.f_back
    seen += [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
    values = [v for o in seen for v in (o.values() if isinstance(o, dict) else o)]
    return any(isinstance(v, str) and v == str(771234) for v in values)
"""


def test_nothing_within_reach_is_the_expected_result(bench):
    # Were it found, the result would be true, and the expected string wrong all the same.
    tests = [("[1]", "false"), ("[2]", '"771234"')]
    result = bench.judge(request(SPY, tests, function_name="f", stop_at_first_failure=False))
    assert [test.verdict for test in result.per_test] == [Verdict.OK, Verdict.WRONG_ANSWER]
