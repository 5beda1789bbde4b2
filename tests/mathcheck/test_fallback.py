"""SymPy reads references that our parser cannot. Each test runs it in a worker, as a service does:
loading it in this process would change what the other tests see."""

import asyncio

import pytest

from verifier_sandbox.mathcheck import MathVerdict, check
from verifier_sandbox.mathcheck.pool import MathPool

pytest.importorskip("latex2sympy2_extended", reason="the extra `sympy` is not installed")

PAIRS = {
    (r"\int_0^1 x^2 dx", r"\frac{1}{3}"): MathVerdict.CORRECT,
    (r"\int_0^1 x^2 dx", r"\frac{1}{4}"): MathVerdict.WRONG,
    (r"\lim_{x \to 0} \frac{\sin x}{x}", "1"): MathVerdict.CORRECT,
    (r"\sum_{k=1}^{\infty} \frac{1}{2^k}", "1"): MathVerdict.CORRECT,
    (r"\sum_{k=1}^{\infty} \frac{1}{2^k}", "2"): MathVerdict.WRONG,
    # An integral as an answer would repay the question.
    (r"\frac{1}{3}", r"\int_0^1 x^2 dx"): MathVerdict.UNREADABLE_PREDICTION,
    # The cost guard keeps this from SymPy.
    (r"\int_0^1 x^{x^{x}} dx", "1"): MathVerdict.UNREADABLE_REFERENCE,
    (r"\int_0^1 __import__('os') dx", "1"): MathVerdict.UNREADABLE_REFERENCE,
}


def test_sympy_reads_references_and_only_those():
    async def test():
        async with MathPool() as pool:
            return {pair: (await pool.check(*pair)).verdict for pair in PAIRS}

    assert asyncio.run(asyncio.wait_for(test(), timeout=300)) == PAIRS


def test_the_function_alone_never_loads_sympy():
    assert check(r"\int_0^1 x^2 dx", "1/3").verdict is MathVerdict.UNREADABLE_REFERENCE
