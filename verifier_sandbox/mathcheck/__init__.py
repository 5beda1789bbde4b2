r"""Decide whether a final answer equals a reference answer: never fooled, never hung.

    >>> check("1/2", r"so the probability is \boxed{0.5}").verdict
    <MathVerdict.CORRECT: 'correct'>

`check` is a pure function, safe in any thread; `pool.MathPool` runs it in killable worker
processes, which is what a service should use. `policy` lists what counts as equal where graders
differ.
"""

from .boxed import last_boxed
from .checker import check
from .result import MathResult, MathVerdict

__all__ = ["MathResult", "MathVerdict", "check", "last_boxed"]
