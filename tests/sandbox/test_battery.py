"""Every program of the battery gets the verdict that it must get.

The same battery under weaker isolation (about a minute more): `pytest -m slow tests/sandbox`.
"""

import subprocess
import sys

import pytest

from verifier_sandbox.battery import cases
from verifier_sandbox.protocol import Language

BATTERY = [case for language in Language for case in cases(language)]


@pytest.fixture(scope="module")
def results(bench):
    judged = bench.judge_all(case.request() for case in BATTERY)
    return {case.id: result for case, result in zip(BATTERY, judged, strict=True)}


@pytest.mark.sandbox
@pytest.mark.parametrize("case", BATTERY, ids=lambda case: case.id)
def test_program_gets_its_verdict(case, results):
    result = results[case.id]
    assert result.verdict is case.verdict, f"{case.why}: {result.detail} {result.per_test}"


def test_battery_is_as_large_as_promised():
    assert len(cases(Language.CPP)) >= 60
    assert len(cases(Language.PYTHON)) >= 40
    assert len({case.id for case in BATTERY}) == len(BATTERY)


@pytest.mark.slow
@pytest.mark.sandbox
def test_battery_passes_without_an_identity_per_slot():
    command = [sys.executable, "-m", "verifier_sandbox", "selftest", "--no-slot-uids"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert answer.returncode == 0, answer.stdout
    assert "UNPRIVILEGED" in answer.stdout
