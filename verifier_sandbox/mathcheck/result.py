"""What a maths check answers, and the errors its layers raise to stop early."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MathVerdict(Enum):
    """The outcome of one check. Only CORRECT pays; INTERNAL is a fault of ours, never an answer."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNREADABLE_PREDICTION = "unreadable_prediction"
    UNREADABLE_REFERENCE = "unreadable_reference"
    TOO_BIG = "too_big"
    TIMEOUT = "timeout"
    INTERNAL = "internal"


@dataclass(frozen=True)
class MathResult:
    """A verdict and the layer or rule that decided it, in a few words."""

    verdict: MathVerdict
    reason: str


class Unreadable(ValueError):
    """The text is not an answer this package can read."""


class TooBig(ArithmeticError):
    """Reading or evaluating the answer would exceed a bound of `policy`."""


class Undefined(ArithmeticError):
    """The expression has no value here: division by zero, log of zero, a non-real point."""
