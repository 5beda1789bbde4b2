"""Numbers do not change by accident: a tiny run against the one on record.

After a change that is meant to change them: `python -m tests.trainer.golden`, and say why in the
commit. Kernels without vector instructions (ATEN_CPU_CAPABILITY=default, MKL_CBWR=COMPATIBLE) moved
them by at most 1.5e-6 relative.
"""

from __future__ import annotations

import json

import pytest

from tests.trainer.golden import GOLDEN, NUM_STEPS, trace

pytestmark = pytest.mark.distributed


def test_a_run_repeats_the_numbers_on_record() -> None:
    want = json.loads(GOLDEN.read_text())
    assert len(want) == NUM_STEPS
    for step, (got, expected) in enumerate(zip(trace(), want, strict=True)):
        assert got == pytest.approx(expected, rel=1e-5), f"step {step}"
