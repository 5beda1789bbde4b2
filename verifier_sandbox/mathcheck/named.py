"""Answers with names: labels, the roots of one unknown, and parameters that are renamed."""

from __future__ import annotations

from dataclasses import replace

from .answers import (
    Answer,
    Assignment,
    Conditions,
    Family,
    Membership,
    Order,
    Phrase,
    Quantity,
    Relation,
    Sequence_,
    Words,
)
from .nodes import Node, Op, has_constant, rename_symbol, subtract, symbols
from .read_lists import mentions

_PARAMETERS = frozenset("klmn")
_CHOICE_LETTERS = frozenset("ABCDEFGHIJ")


def equates_choices(answer: Assignment) -> bool:
    """Whether it reads A = B, which does not choose B."""
    value = answer.value.node.name if isinstance(answer.value, Quantity) else ""
    return {answer.name, value} <= _CHOICE_LETTERS


def as_equation(answer: Assignment) -> Node | None:
    """x = 5 as x - 5; None if the name or the value is no expression."""
    if answer.name_node is None or not isinstance(answer.value, Quantity):
        return None
    return subtract(answer.name_node, answer.value.node)


def renamed(answer: Answer, old: str, new: str) -> Answer:
    """The answer with another name for a symbol."""
    if isinstance(answer, Quantity):
        return replace(answer, node=rename_symbol(answer.node, old, new))
    if isinstance(answer, Assignment):
        return replace(answer, value=renamed(answer.value, old, new))
    if isinstance(answer, Sequence_):
        return replace(answer, items=tuple(renamed(item, old, new) for item in answer.items))
    return answer


def with_same_arguments(reference: Assignment, prediction: Assignment) -> Answer | None:
    """f(t) = t^2 as the value of f(x), x^2; None if the functions or their arguments differ."""
    new, old = _only_argument(reference.name_node), _only_argument(prediction.name_node)
    if new is None or old is None or new[0] != old[0] or mentions(prediction.value, new[1]):
        return None
    return renamed(prediction.value, old[1], new[1])


def _only_argument(node: Node | None) -> tuple[str, str] | None:
    """("f", "x") for f(x); None if it is no function of one symbol."""
    if node is None or node.op is not Op.APPLY or len(node.args) != 1:
        return None
    return (node.name, node.args[0].name) if node.args[0].op is Op.SYMBOL else None


def with_same_parameter(reference: Node, prediction: Node) -> Node:
    r"""n \pi with the name that the reference gives to its only parameter, an integer."""
    wanted, found = symbols(reference), symbols(prediction)
    if len(wanted) != 1 or len(found) != 1 or not wanted | found <= _PARAMETERS:
        return prediction
    is_periodic = has_constant(reference, "pi")
    return rename_symbol(prediction, *found, *wanted) if is_periodic else prediction


def without_real_domain(answer: Answer) -> Answer:
    """What holds for all real values of its parameters, without saying so."""
    while isinstance(answer, Family) and answer.domain == "R":
        answer = answer.answer
    return answer


def names_in(sequence: Sequence_) -> set[str]:
    """The names that get a value in the sequence."""
    return {item.name for item in sequence.items if isinstance(item, Assignment)}


def describes(answer: Answer, name: str) -> bool:
    """Whether the answer says which values the name has, as x > 1 does."""
    if isinstance(answer, Sequence_ | Conditions):
        items = answer.items if isinstance(answer, Sequence_) else answer.parts
        return any(describes(item, name) for item in items)
    if isinstance(answer, Relation):
        return any(name in symbols(side) for side in answer.sides)
    return isinstance(answer, Assignment | Membership) and answer.name == name


def may_mean_the_same(left: Sequence_, right: Sequence_) -> bool:
    """Whether "or" on one side only joins the roots of one unknown."""
    if left.is_disjunction is right.is_disjunction:
        return True
    roots, other = (left, right) if left.is_disjunction else (right, left)
    if other.order is Order.TUPLE or len(roots.items) != len(other.items):
        return False
    names = {name_in(item) for item in other.items}
    return (
        len({name_in(item) for item in roots.items}) == 1
        and not any(map(_is_statement, roots.items))
        and (len(names) == 1 or len({name.partition("_")[0] for name in names}) == 1)
    )


def _is_statement(answer: Answer) -> bool:
    """Whether the answer is a word or a letter that may stand for a choice or a statement."""
    is_letter = isinstance(answer, Quantity) and answer.node.op is Op.SYMBOL
    return is_letter or isinstance(answer, Words | Phrase)


def name_in(item: Answer) -> str:
    """The name that gets a value, or ""."""
    return item.name if isinstance(item, Assignment) else ""


def spread(assignment: Assignment) -> Sequence_ | None:
    """(x, y) = (1, 2) as x = 1, y = 2; None if the name is not a tuple of names."""
    names = assignment.name.strip("()").split(",")
    values = assignment.value
    if not isinstance(values, Sequence_) or len(names) != len(values.items):
        return None
    pairs = zip(names, values.items, strict=True)
    return Sequence_(Order.LIST, tuple(Assignment(name, value) for name, value in pairs))
