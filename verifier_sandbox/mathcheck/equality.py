"""Whether two expressions are equal: exactly if they are rational, else at high precision.

Constants are compared at a precision that follows the range of their intermediate values, so that
neither 1/2 + 10^{-30} nor a cancelled root is misjudged. Expressions with symbols are compared at
seeded points; where one side is not real or not defined, a point says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

from . import policy
from .approximations import stands_for
from .evaluate import Evaluator
from .facts import exactly_equal, facts_of
from .matrices import Matrix
from .nodes import Node, Op, canonical_key, replace_symbols, symbols
from .numeric import NumericField, WorkBudget, magnitude
from .points import Point, Scale, points
from .result import TooBig, Undefined
from .steps import has_unmatched_step
from .values import Setting, is_real, value_at

_GUARD_BITS = 70  # of the precision, what rounding errors may have spoiled
_SLACK_BITS = 60  # of the precision, what is not worth another evaluation
_MAX_EVALUATIONS = 4  # of one side at one point
_CLOSE_RATIO_BITS = 60
_COMPARISON_UNITS = 20  # of work, whatever the expressions are


@dataclass(frozen=True)
class _Precision:
    """Bits of a comparison: for values of ordinary size, more at first, and at most."""

    base_bits: int
    headroom_bits: int
    """Spares a second evaluation where a part of the values is much smaller than the rest."""
    largest_bits: int


_NEAR = _Precision(policy.PRECISION_BITS, 0, policy.MAX_PRECISION_BITS)
_FAR = _Precision(policy.PRECISION_BITS, policy.HEADROOM_BITS, policy.MAX_FAR_BITS)
_CONSTANT = _Precision(policy.CONSTANT_BITS, policy.HEADROOM_BITS, policy.MAX_PRECISION_BITS)
_NOWHERE: Mapping[str, Any] = {}


class _Agreement(Enum):
    EQUAL = "equal"
    DIFFERENT = "different"
    SILENT = "silent"  # a side is not real or not defined here


@dataclass(frozen=True)
class _Evaluation:
    """What one evaluation of both sides showed (see NumericField)."""

    precision_bits: int
    largest_bits: int
    lost_bits: int
    range_bits: int
    """From the largest intermediate value down to the smallest result."""

    def settled(self, last: _Evaluation | None) -> _Evaluation:
        """This evaluation, but without what only follows the precision: a zero in disguise.

        As a result or as a term it is smaller at every higher precision; a true value is not.
        """
        if last is None:
            return self
        growth_bits = (self.precision_bits - last.precision_bits) // 2
        lost_bits, range_bits = self.lost_bits, self.range_bits
        if range_bits - last.range_bits >= growth_bits:
            range_bits = 0
        if lost_bits - last.lost_bits >= growth_bits:
            lost_bits = last.lost_bits
        return _Evaluation(self.precision_bits, self.largest_bits, lost_bits, range_bits)


def equal(left: Node, right: Node, budget: WorkBudget) -> bool:
    """Whether the expressions have the same value everywhere. Raises TooBig."""
    if left is right or left == right:
        return True
    try:
        return _equal_values(left, right, budget)
    except TooBig:
        # Towers of powers have no value here, but the order of terms can still be put aside.
        if canonical_key(left) == canonical_key(right):
            return True
        raise


def _equal_values(left: Node, right: Node, budget: WorkBudget) -> bool:
    a, b = facts_of(left, budget), facts_of(right, budget)
    if (a.names or b.names) and has_unmatched_step(a.step_kinds, b.step_kinds):
        return canonical_key(left) == canonical_key(right)
    if a.plain is not None and b.plain is not None:
        return a.plain == b.plain
    if a.infinity or b.infinity:
        return a.infinity == b.infinity
    budget.spend(_COMPARISON_UNITS)
    if stands_for(left, right, budget) or stands_for(right, left, budget):
        return True
    settings = [
        Setting(radians, decimal_log, is_real=bool(a.names or b.names) and not (a.has_i or b.has_i))
        for radians in ((False, True) if a.has_degrees or b.has_degrees else (False,))
        for decimal_log in ((False, True) if a.has_log or b.has_log else (False,))
    ]
    if not a.names and not b.names and (exactly := exactly_equal(a, b)) is not None:
        if exactly or not (a.has_degrees or b.has_degrees):
            return exactly
        settings = [setting for setting in settings if setting.radians]
    return any(_equal_at_points(left, right, setting, budget) for setting in settings)


def proportional(left: Node, right: Node, budget: WorkBudget, *, positive: bool) -> bool:
    """Whether left = c * right with one constant c, not zero (above zero if `positive`)."""
    budget.spend(_COMPARISON_UNITS)
    kinds = [facts_of(node, budget).step_kinds for node in (left, right)]
    if not symbols(left) | symbols(right) or has_unmatched_step(*kinds):
        return False
    ratio: Any = None
    first: Mapping[str, Any] | None = None
    agreements = lost_bits = 0
    for point in points(left, right):
        if point.scale is not Scale.NEAR:
            continue
        field = NumericField(policy.PRECISION_BITS, point.values, budget, is_real=True)
        try:
            a, b = (Evaluator(field).value(node) for node in (left, right))
        except Undefined:
            continue
        if isinstance(a, Matrix) or isinstance(b, Matrix) or not (is_real(a) and is_real(b)):
            continue
        if not a or not b:
            if bool(a) != bool(b):
                return False
            continue
        here = a / b
        if (positive and here < 0) or (
            ratio is not None and abs(here - ratio) > abs(ratio) * field.mp.ldexp(1, -100)
        ):
            return False
        ratio = here
        first = first or point.values
        agreements += 1
        lost_bits = max(lost_bits, field.lost_bits)
        if agreements >= policy.NUM_RATIOS:
            break
    if agreements < policy.MIN_AGREEMENTS or first is None:
        return False
    unseen_bits = 2 * lost_bits + max(
        facts_of(node, budget).approximation_bits for node in (left, right)
    )
    return unseen_bits <= _CLOSE_RATIO_BITS or _exactly_proportional(left, right, first, budget)


def _exactly_proportional(
    left: Node, right: Node, values: Mapping[str, Fraction], budget: WorkBudget
) -> bool:
    """Whether left(x) right(x_0) = right(x) left(x_0): the ratio is what it is at one point."""
    at_point = [replace_symbols(node, values) for node in (left, right)]
    return equal(
        Node(Op.MULTIPLY, (left, at_point[1])), Node(Op.MULTIPLY, (right, at_point[0])), budget
    )


def _equal_at_points(left: Node, right: Node, setting: Setting, budget: WorkBudget) -> bool:
    if not facts_of(left, budget).names and not facts_of(right, budget).names:
        return _compare_at(_NOWHERE, left, right, setting, budget, _CONSTANT) is _Agreement.EQUAL
    agreements = 0
    for point in points(left, right):
        here = _compare_near_or_far(point, left, right, setting, budget)
        if here is _Agreement.DIFFERENT:
            return False
        agreements += here is _Agreement.EQUAL and not point.is_extra
        if agreements >= policy.NUM_POINTS:
            break
    return agreements >= policy.MIN_AGREEMENTS


def _compare_near_or_far(
    point: Point, left: Node, right: Node, setting: Setting, budget: WorkBudget
) -> _Agreement:
    """Compare at one point; far away a value may be out of reach, and then says nothing."""
    if point.scale is Scale.COMPLEX:
        setting = Setting(setting.radians, setting.decimal_log, is_real=False)
    if point.scale is not Scale.FAR:
        return _compare_at(point.values, left, right, setting, budget, _NEAR)
    try:
        return _compare_at(point.values, left, right, setting, budget, _FAR)
    except TooBig:
        if budget.is_spent:
            raise
        return _Agreement.SILENT


def _compare_at(
    values: Mapping[str, Any],
    left: Node,
    right: Node,
    setting: Setting,
    budget: WorkBudget,
    precision: _Precision,
) -> _Agreement:
    """Compare at one point, again with more bits while the range of the values demands it."""
    sides = facts_of(left, budget), facts_of(right, budget)
    # A side that is known exactly says how small a difference matters: 10^{-100} is not cos 90°.
    base_bits = precision.base_bits + max(side.bits_below_one for side in sides)
    base_bits += max(side.approximation_bits for side in sides)
    needed_bits = base_bits + precision.headroom_bits
    last: _Evaluation | None = None
    for _ in range(_MAX_EVALUATIONS):
        if needed_bits > precision.largest_bits:
            raise TooBig("a comparison that needs too many digits")
        precision_bits = needed_bits
        a, b = (value_at(node, values, precision_bits, setting, budget) for node in (left, right))
        if a is None or b is None:
            return _Agreement.SILENT
        pairs = _scalar_pairs(a.value, b.value)
        if pairs is None:
            return _Agreement.DIFFERENT
        if setting.is_real and not all(is_real(x) and is_real(y) for x, y in pairs):
            return _Agreement.SILENT
        largest_bits = max(a.largest_bits, b.largest_bits)
        if last is not None and largest_bits > last.largest_bits + _GUARD_BITS:
            return _Agreement.SILENT  # grows with the precision: something was divided by zero
        noise_bits = largest_bits - precision_bits + _GUARD_BITS
        if any(x != y and magnitude(x - y) > noise_bits for x, y in pairs):
            return _Agreement.DIFFERENT
        last = _Evaluation(
            precision_bits,
            largest_bits,
            max(a.lost_bits, b.lost_bits),
            max(largest_bits - _scale(pair, largest_bits) for pair in pairs),
        ).settled(last)
        # How small a value may be is not known from one look at what may be a zero in disguise.
        range_bits = min(last.range_bits, 2 * precision_bits)
        needed_bits = base_bits + 2 * last.lost_bits + range_bits
        if precision_bits >= needed_bits - _SLACK_BITS:
            return _Agreement.EQUAL
    raise TooBig("a comparison that does not settle")


def _scale(pair: tuple[Any, Any], default: int) -> int:
    return max((magnitude(value) for value in pair if value), default=default)


def _scalar_pairs(a: Any, b: Any) -> list[tuple[Any, Any]] | None:
    """The scalars to compare, or None if the shapes differ."""
    if isinstance(a, Matrix) and isinstance(b, Matrix):
        if a.shape != b.shape:
            return None
        return [
            pair for rows in zip(a.rows, b.rows, strict=True) for pair in zip(*rows, strict=True)
        ]
    if isinstance(a, Matrix) or isinstance(b, Matrix):
        return None
    return [(a, b)]
