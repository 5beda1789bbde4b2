"""What names mean in an expression: constants, functions, subscripts."""

from __future__ import annotations

from .name_tables import name_set
from .nodes import Node, Op, call, has_constant, number
from .result import Unreadable
from .tokens import FUNCTIONS

UNKNOWN_FUNCTIONS = frozenset(("f", "g", "h", "F", "G", "H", "\\phi", "\\psi"))
"""Letters that are functions before a parenthesis; any other letter multiplies it."""

_CONSTANTS = {"pi": "pi", "infinity": "infinity", "i": "i", "e": "e"}
ATOM_NAMES = frozenset(FUNCTIONS.values()) | name_set(
    "frac binom sqrt sum prod overline vec hat tilde dot arc pi infinity i e"
)
"""Names that can start a factor."""
CLOSERS = name_set("mathbb overset reals emptyset")

_TRIGONOMETRIC = name_set("sin cos tan cot sec csc sinh cosh tanh coth sech csch")
_SEVERAL_ARGUMENTS = name_set("gcd lcm max min")


def constant(name: str) -> Node | None:
    """The constant of this name."""
    return Node(Op.CONSTANT, name=_CONSTANTS[name]) if name in _CONSTANTS else None


def has_only_numbers(node: Node) -> bool:
    """Whether the expression is made of number literals."""
    return all(part.op is not Op.SYMBOL and part.op is not Op.APPLY for part in node.walk())


def subscripted(node: Node, script: Node) -> Node:
    """A name with an index: an unknown function of the index, so a_{1+1} is a_2."""
    if node.op is Op.CONSTANT and node.name in ("e", "i"):
        node = Node(Op.SYMBOL, name=node.name)
    if node.op is Op.SYMBOL:
        return Node(Op.APPLY, (script,), node.name + "_")
    raise Unreadable("a subscript after something that is not a name")


def apply_function(
    name: str, args: list[Node], base: Node | None = None, exponent: Node | None = None
) -> Node:
    r"""A known function with its arguments, its base (\log_2) and its power (\sin^2)."""
    if name in _SEVERAL_ARGUMENTS:
        value = call(name, *args)
    elif name == "binom":
        if len(args) != 2:
            raise Unreadable("binom takes two arguments")
        value = call(name, *args)
    elif len(args) != 1 and not (name == "log" and len(args) == 2):
        raise Unreadable(f"{name} takes one argument")
    elif name == "log":
        value = _logarithm(args, base)
    elif base is not None:
        raise Unreadable(f"{name} takes no base")
    elif name in ("exp", "cbrt", "lg", "lb", "cis"):
        value = _defined(name, args[0])
    elif exponent is not None and _is_minus_one(exponent) and name in _TRIGONOMETRIC:
        return call(f"arc{name}" if len(name) == 3 else f"ar{name}", args[0])
    else:
        value = call(name, args[0])
    return value if exponent is None else Node(Op.POWER, (value, exponent))


def _logarithm(args: list[Node], base: Node | None) -> Node:
    if len(args) == 2:
        base = args[1]
    if base is None:
        return call("log", args[0])
    if base.op is Op.CONSTANT and has_constant(base, "e"):
        return call("ln", args[0])
    return _quotient(call("ln", args[0]), call("ln", base))


def _defined(name: str, arg: Node) -> Node:
    """Functions that are short for something else."""
    e, i = Node(Op.CONSTANT, name="e"), Node(Op.CONSTANT, name="i")
    if name == "exp":
        return Node(Op.POWER, (e, arg))
    if name == "cbrt":
        return Node(Op.ROOT, (arg, number(3)))
    if name == "cis":
        return Node(Op.ADD, (call("cos", arg), Node(Op.MULTIPLY, (i, call("sin", arg)))))
    return _quotient(call("ln", arg), call("ln", number(10 if name == "lg" else 2)))


def _quotient(above: Node, below: Node) -> Node:
    return Node(Op.MULTIPLY, (above, Node(Op.INVERT, (below,))))


def _is_minus_one(node: Node) -> bool:
    if node.op is not Op.NEGATE or node.args[0].literal is None:
        return False
    return node.args[0].literal.value == 1
