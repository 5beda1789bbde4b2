"""Numeric values of an expression: at a point of its symbols, and of a constant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from . import policy
from .evaluate import Evaluator
from .facts import facts_of
from .matrices import Matrix
from .nodes import Node
from .numeric import NumericField, WorkBudget, magnitude
from .result import Undefined

_MAX_SIZE_BITS = 100
_EVALUATION_UNITS = 8  # of work, on top of what its operations take
_MAX_UNSEEN_BITS = 200  # of a value that is compared at the first precision only


@dataclass(frozen=True)
class Setting:
    """What an expression means where its notation leaves a choice."""

    radians: bool = False
    decimal_log: bool = False
    is_real: bool = False


@dataclass(frozen=True)
class Value:
    """A value, and the range of its intermediate values (see NumericField)."""

    value: Any
    largest_bits: int
    lost_bits: int


def value_at(
    node: Node,
    values: Mapping[str, Any],
    precision_bits: int,
    setting: Setting,
    budget: WorkBudget,
) -> Value | None:
    """The value at a point, or None where there is none; kept for other comparisons with it."""
    key = (id(node), id(values), precision_bits, setting)
    facts_of(node, budget)  # keeps the node alive, so its id stays its own
    budget.memo[id(values)] = values  # and the point too
    if key not in budget.memo:
        budget.spend(_EVALUATION_UNITS)
        field = NumericField(
            precision_bits,
            values,
            budget,
            decimal_log=setting.decimal_log,
            is_real=setting.is_real,
        )
        try:
            value = Evaluator(field, radians=setting.radians).value(node)
            budget.memo[key] = Value(value, field.largest_bits, field.lost_bits)
        except Undefined:
            budget.memo[key] = None
    return cast("Value | None", budget.memo[key])


def value_of(
    node: Node,
    budget: WorkBudget,
    values: Mapping[str, Any] | None = None,
    precision_bits: int = policy.PRECISION_BITS,
) -> Any:
    """The real value of a node. Raises Undefined if it has none."""
    budget.spend(_EVALUATION_UNITS)
    value = Evaluator(NumericField(precision_bits, values or {}, budget)).value(node)
    return _real(value)


def coarse_value_of(node: Node, budget: WorkBudget, values: Mapping[str, Any] | None = None) -> Any:
    """The real value of a node whose first digits tell it from every value near it.

    Raises Undefined if it has none, and for 1 + 10^{-50}, which needs a closer look.
    """
    budget.spend(_EVALUATION_UNITS)
    field = NumericField(policy.PRECISION_BITS, values or {}, budget)
    value = _real(Evaluator(field).value(node))
    unseen_bits = 2 * (field.lost_bits + facts_of(node, budget).number_bits)
    if unseen_bits > _MAX_UNSEEN_BITS or (value and abs(magnitude(value)) > _MAX_SIZE_BITS):
        raise Undefined("too close to other values for a comparison of sets")
    return value


def is_real(value: Any) -> bool:
    """Whether the imaginary part is nothing but rounding."""
    imaginary = value.imag
    return not imaginary or abs(imaginary) <= abs(value.real) * 2.0**-150


def _real(value: Any) -> Any:
    if isinstance(value, Matrix) or not is_real(value):
        raise Undefined("not a real number")
    return value.real if hasattr(value, "real") else value
