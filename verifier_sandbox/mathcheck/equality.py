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
from functools import cached_property
from typing import Any, cast

from . import policy
from .evaluate import Evaluator
from .exact import ExactField, NotExact
from .matrices import Matrix
from .modular import equal_residues
from .nodes import Node, Op, canonical_key, symbols
from .numeric import NumericField, WorkBudget, magnitude
from .points import points
from .result import TooBig, Undefined

_GUARD_BITS = 70  # of the precision, what rounding errors may have spoiled
_MAX_EVALUATIONS = 4  # of one side at one point


class _Agreement(Enum):
    EQUAL = "equal"
    DIFFERENT = "different"
    SILENT = "silent"  # a side is not real or not defined here


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
    a, b = _facts(left, budget), _facts(right, budget)
    if a.plain is not None and b.plain is not None:
        return a.plain == b.plain
    if a.infinity or b.infinity:
        return a.infinity == b.infinity
    if _rounds(left, right, budget) or _rounds(right, left, budget):
        return True
    settings = [
        _Setting(
            radians, decimal_log, is_real=bool(a.names or b.names) and not (a.has_i or b.has_i)
        )
        for radians in ((False, True) if a.has_degrees or b.has_degrees else (False,))
        for decimal_log in ((False, True) if a.has_log or b.has_log else (False,))
    ]
    if not a.names and not b.names and (exactly := _exactly_equal(a, b)) is not None:
        if exactly or not (a.has_degrees or b.has_degrees):
            return exactly
        settings = [setting for setting in settings if setting.radians]
    return any(_equal_at_points(left, right, setting, budget) for setting in settings)


def proportional(left: Node, right: Node, budget: WorkBudget, *, positive: bool) -> bool:
    """Whether left = c * right with one constant c, not zero (above zero if `positive`)."""
    names = symbols(left) | symbols(right)
    if not names:
        return False
    ratio: Any = None
    agreements = 0
    for values in points(left, right):
        field = NumericField(policy.PRECISION_BITS, values, budget, is_real=True)
        try:
            a, b = (Evaluator(field).value(node) for node in (left, right))
        except Undefined:
            continue
        if isinstance(a, Matrix) or isinstance(b, Matrix) or not (_is_real(a) and _is_real(b)):
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
        agreements += 1
    return agreements >= policy.MIN_AGREEMENTS


def value_of(node: Node, budget: WorkBudget, values: Mapping[str, Any] | None = None) -> Any:
    """The real value of a node at the first precision. Raises Undefined if it has none."""
    value = Evaluator(NumericField(policy.PRECISION_BITS, values or {}, budget)).value(node)
    if isinstance(value, Matrix) or not _is_real(value):
        raise Undefined("not a real number")
    return value.real if hasattr(value, "real") else value


# decimals


def _rounds(decimal: Node, exact: Node, budget: WorkBudget) -> bool:
    """Whether a long decimal stands for an exact value, rounded or cut in its last digit."""
    sign = -1 if decimal.op is Op.NEGATE else 1
    literal = (decimal.args[0] if sign < 0 else decimal).literal
    if literal is None or literal.num_decimals is None or symbols(exact):
        return False
    if literal.num_significant < policy.EXACT_DECIMAL_DIGITS or _is_decimal(exact):
        return False
    return _within(exact, sign * literal.value, Fraction(1, 10**literal.num_decimals), budget)


def agrees_in_digits(approximation: Node, exact: Node, budget: WorkBudget) -> bool:
    r"""Whether `exact \approx approximation` holds to the digits that are written."""
    sign = -1 if approximation.op is Op.NEGATE else 1
    literal = (approximation.args[0] if sign < 0 else approximation).literal
    if literal is None or symbols(exact):
        return equal(approximation, exact, budget)
    ulp = Fraction(1, 10 ** (literal.num_decimals or 0))
    return _within(exact, sign * literal.value, ulp, budget)


def _within(node: Node, value: Fraction, ulp: Fraction, budget: WorkBudget) -> bool:
    try:
        exact = value_of(node, budget)
    except Undefined:
        return False
    error = abs(exact * value.denominator - value.numerator)
    return bool(error * ulp.denominator <= value.denominator * ulp.numerator)


def _is_decimal(node: Node) -> bool:
    inner = node.args[0] if node.op is Op.NEGATE else node
    return inner.literal is not None and inner.literal.num_decimals is not None


# what is known of one side


class _Exactness(Enum):
    """Why an expression has no exact rational value."""

    NOT_RATIONAL = "not rational"
    UNDEFINED = "undefined"
    TOO_BIG = "too big"


class _Facts:
    """What a comparison asks about one side; computed once, because lists compare all pairs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.names = symbols(node)
        self.plain = _plain_number(node)
        self.infinity = _infinity(node)
        parts = list(node.walk())
        self.has_degrees = any(part.op is Op.DEGREE for part in parts)
        self.has_log = any(part.op is Op.CALL and part.name == "log" for part in parts)
        self.has_i = any(part.op is Op.CONSTANT and part.name == "i" for part in parts)

    @cached_property
    def exact(self) -> Any:
        """The exact value, or the _Exactness that says why there is none."""
        try:
            return Evaluator(ExactField()).value(self.node)
        except NotExact:
            return _Exactness.NOT_RATIONAL
        except Undefined:
            return _Exactness.UNDEFINED
        except TooBig:
            return _Exactness.TOO_BIG

    @property
    def bits_below_one(self) -> int:
        """-log2 of the size of an exact value below one, else 0."""
        if self.names or not isinstance(self.exact, Fraction) or not self.exact:
            return 0
        size = self.exact.denominator.bit_length() - self.exact.numerator.bit_length()
        return max(0, size)


def _facts(node: Node, budget: WorkBudget) -> _Facts:
    key = ("facts", id(node))
    if key not in budget.memo:
        budget.memo[key] = _Facts(node)  # keeps the node alive, so its id stays its own
    return cast(_Facts, budget.memo[key])


def _exactly_equal(a: _Facts, b: _Facts) -> bool | None:
    """Exact comparison, or None if a side is not rational. Raises TooBig."""
    if a.exact is _Exactness.NOT_RATIONAL or b.exact is _Exactness.NOT_RATIONAL:
        return None
    if _Exactness.TOO_BIG in (a.exact, b.exact):
        try:
            return equal_residues(a.node, b.node)
        except NotExact:
            raise TooBig("a long number that has no residue") from None
        except Undefined:
            return False
    if _Exactness.UNDEFINED in (a.exact, b.exact):
        return False
    return bool(a.exact == b.exact)


# numerically


@dataclass(frozen=True)
class _Setting:
    """What an expression means where its notation leaves a choice."""

    radians: bool
    decimal_log: bool
    is_real: bool


@dataclass(frozen=True)
class _Value:
    """A value, and the range of its intermediate values (see NumericField)."""

    value: Any
    largest_bits: int
    lost_bits: int


def _equal_at_points(left: Node, right: Node, setting: _Setting, budget: WorkBudget) -> bool:
    if not _facts(left, budget).names and not _facts(right, budget).names:
        return _compare_at({}, left, right, setting, budget) is _Agreement.EQUAL
    agreements = 0
    for values in points(left, right):
        here = _compare_at(values, left, right, setting, budget)
        if here is _Agreement.DIFFERENT:
            return False
        agreements += here is _Agreement.EQUAL
        if agreements >= policy.NUM_POINTS:
            break
    return agreements >= policy.MIN_AGREEMENTS


def _compare_at(
    values: Mapping[str, Fraction], left: Node, right: Node, setting: _Setting, budget: WorkBudget
) -> _Agreement:
    """Compare at one point, again with more bits while the range of the values demands it."""
    # A side that is known exactly says how small a difference matters: 10^{-100} is not cos 90°.
    needed_bits = policy.PRECISION_BITS + max(
        _facts(node, budget).bits_below_one for node in (left, right)
    )
    stable_bits: int | None = None
    for _ in range(_MAX_EVALUATIONS):
        precision_bits = needed_bits
        a, b = (_value(node, values, precision_bits, setting, budget) for node in (left, right))
        if a is None or b is None:
            return _Agreement.SILENT
        pairs = _scalar_pairs(a.value, b.value)
        if pairs is None:
            return _Agreement.DIFFERENT
        if setting.is_real and not all(_is_real(x) and _is_real(y) for x, y in pairs):
            return _Agreement.SILENT
        largest_bits = max(a.largest_bits, b.largest_bits)
        lost_bits = max(a.lost_bits, b.lost_bits)
        if stable_bits is not None and largest_bits > stable_bits + _GUARD_BITS:
            return _Agreement.SILENT  # grows with the precision: something was divided by zero
        stable_bits = largest_bits
        range_bits = max(largest_bits - _scale(pair, largest_bits) for pair in pairs)
        # A zero in disguise looks smaller at every precision, so the growth is bounded.
        needed_bits = policy.PRECISION_BITS + max(lost_bits, min(range_bits, 2 * precision_bits))
        if precision_bits >= needed_bits - 60:
            break
        if needed_bits > policy.MAX_PRECISION_BITS:
            raise TooBig("a comparison that needs too many digits")
    assert pairs is not None
    noise_bits = largest_bits - precision_bits + _GUARD_BITS
    is_equal = all(x == y or magnitude(x - y) <= noise_bits for x, y in pairs)
    return _Agreement.EQUAL if is_equal else _Agreement.DIFFERENT


def _value(
    node: Node,
    values: Mapping[str, Fraction],
    precision_bits: int,
    setting: _Setting,
    budget: WorkBudget,
) -> _Value | None:
    """The value at a point, or None where there is none; kept for other comparisons with it."""
    key = (id(node), tuple(values.items()), precision_bits, setting)
    _facts(node, budget)  # keeps the node alive, so its id stays its own
    if key not in budget.memo:
        field = NumericField(
            precision_bits,
            values,
            budget,
            decimal_log=setting.decimal_log,
            is_real=setting.is_real,
        )
        try:
            value = Evaluator(field, radians=setting.radians).value(node)
            budget.memo[key] = _Value(value, field.largest_bits, field.lost_bits)
        except Undefined:
            budget.memo[key] = None
    return cast("_Value | None", budget.memo[key])


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


def _is_real(value: Any) -> bool:
    imaginary = value.imag
    return not imaginary or abs(imaginary) <= abs(value.real) * 2.0**-150


def _plain_number(node: Node) -> Fraction | None:
    """The value of a literal with or without a sign, or None for any other expression."""
    if node.op is Op.NEGATE and node.args[0].literal is not None:
        return -node.args[0].literal.value
    return node.literal.value if node.literal is not None else None


def _infinity(node: Node) -> int:
    """1 or -1 for plus or minus infinity, 0 for anything else."""
    if node.op is Op.NEGATE:
        return -_infinity(node.args[0])
    return int(node.op is Op.CONSTANT and node.name == "infinity")
