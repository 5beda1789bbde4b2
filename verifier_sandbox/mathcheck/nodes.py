"""The syntax tree of an expression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction


class Op(Enum):
    """What a node does with its arguments."""

    NUMBER = "number"  # literal: Literal
    CONSTANT = "constant"  # name: pi, e, i, infinity
    SYMBOL = "symbol"  # name
    ADD = "add"  # any number of arguments
    MULTIPLY = "multiply"  # any number of arguments
    NEGATE = "negate"
    INVERT = "invert"  # 1 / argument
    POWER = "power"  # base, exponent
    ROOT = "root"  # radicand, index
    CALL = "call"  # name of a known function
    APPLY = "apply"  # name of an unknown function, such as f or a_n
    SUM = "sum"  # name of the index; from, to, term
    PRODUCT = "product"  # the same
    PLUS_MINUS = "plus_minus"  # + or - the argument; name: "pm" or "mp"
    DEGREE = "degree"
    PERCENT = "percent"
    MATRIX = "matrix"  # one MATRIX_ROW per row
    MATRIX_ROW = "matrix_row"
    TRANSPOSE = "transpose"

    def __init__(self, spelled: str) -> None:
        self.method = f"_{spelled}"
        """The name of what evaluates it; an attribute, because `value` is slow to get."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A number as it was written. `num_decimals` is None for integers and repeating decimals."""

    value: Fraction
    num_decimals: int | None = field(default=None, compare=False)
    num_significant: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of an expression."""

    op: Op
    args: tuple[Node, ...] = ()
    name: str = ""
    literal: Literal | None = None

    def walk(self) -> Iterator[Node]:
        """This node and all nodes below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.args)


def number(value: int | Fraction) -> Node:
    """An exact number."""
    return Node(Op.NUMBER, literal=Literal(Fraction(value)))


def call(name: str, *args: Node) -> Node:
    """A known function applied to its arguments."""
    return Node(Op.CALL, args, name)


def subtract(left: Node, right: Node) -> Node:
    """left - right."""
    return Node(Op.ADD, (left, Node(Op.NEGATE, (right,))))


def symbols(node: Node) -> frozenset[str]:
    """Names of the free symbols and unknown functions; the index of a sum is not free."""
    own = frozenset((node.name,)) if node.op in (Op.SYMBOL, Op.APPLY) else frozenset()
    below = frozenset().union(*(symbols(arg) for arg in node.args)) if node.args else frozenset()
    if node.op in (Op.SUM, Op.PRODUCT):
        below -= {node.name}
    return own | below


def rename_symbol(node: Node, old: str, new: str) -> Node:
    """The expression with another name for a symbol."""
    if node.op is Op.SYMBOL and node.name == old:
        return Node(Op.SYMBOL, name=new)
    args = tuple(rename_symbol(arg, old, new) for arg in node.args)
    return Node(node.op, args, node.name, node.literal)


def replace_symbols(node: Node, values: Mapping[str, Fraction]) -> Node:
    """The expression with numbers for its free symbols."""
    if node.op is Op.SYMBOL and node.name in values:
        return number(values[node.name])
    if node.op in (Op.SUM, Op.PRODUCT):
        values = {name: value for name, value in values.items() if name != node.name}
    args = tuple(replace_symbols(arg, values) for arg in node.args)
    return Node(node.op, args, node.name, node.literal)


def contains(node: Node, *ops: Op) -> bool:
    """Whether any node of the expression is one of these."""
    return any(part.op in ops for part in node.walk())


def has_constant(node: Node, name: str) -> bool:
    """Whether the constant of this name occurs."""
    return any(part.op is Op.CONSTANT and part.name == name for part in node.walk())


def canonical_key(node: Node) -> tuple[object, ...]:
    """A key that is the same for sums and products whose terms stand in another order."""
    value = node.literal.value if node.literal is not None else None
    if node.op not in (Op.ADD, Op.MULTIPLY):
        return (node.op.value, node.name, value, *(canonical_key(arg) for arg in node.args))
    keys: list[tuple[object, ...]] = []
    for arg in node.args:
        key = canonical_key(arg)
        keys += key[3:] if key[0] == node.op.value else [key]  # type: ignore[arg-type]
    return (node.op.value, "", None, *sorted(keys, key=repr))
