"""A recursive-descent parser of expressions: tokens to syntax tree.

Precedence from loose to tight: sums; products, where writing side by side multiplies; signs;
powers and postfix marks (! % ° '); atoms. Depth is bounded by `policy.MAX_DEPTH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from . import policy
from .functions import ATOM_NAMES, subscripted
from .nodes import Node, Op, call, contains, number
from .parser_atoms import AtomParser, multiply, with_sign
from .result import TooBig, Unreadable
from .tokens import Kind, Token

_FACTOR_START = frozenset((Kind.NUMBER, Kind.LETTER, Kind.OPEN, Kind.BEGIN))
_POSTFIX = frozenset(("^", "_", "!", "%", "deg", "'", "transpose"))


def parse_expression(tokens: Sequence[Token]) -> Node:
    """The expression that all the tokens spell. Raises Unreadable or TooBig."""
    parser = _Parser(tokens)
    node = parser.fraction_like()
    if parser.peek() is not None:
        raise Unreadable(f"unexpected {parser.tokens[parser.position].text!r}"[:60])
    return node


class _Parser(AtomParser):
    """The levels above an atom."""

    # Sums and products

    def fraction_like(self) -> Node:
        r"""A sum, or two of them with \choose or \over between them."""
        node = self.sum()
        if self.accept(Kind.OPERATOR, "choose"):
            return call("binom", node, self.sum())
        if self.accept(Kind.OPERATOR, "over"):
            return Node(Op.MULTIPLY, (node, Node(Op.INVERT, (self.sum(),))))
        return node

    def sum(self) -> Node:
        self.deeper()
        terms = [self.product()]
        while (token := self.peek()) is not None and token.is_(Kind.OPERATOR, "+", "-", "pm", "mp"):
            self.take()
            terms.append(with_sign(token.text, self.product()))
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node(Op.ADD, tuple(terms))

    def product(self) -> Node:
        factors = [self.signed()]
        while (token := self.peek()) is not None:
            if token.is_(Kind.OPERATOR, "*"):
                self.take()
                factors.append(self.signed())
            elif token.is_(Kind.OPERATOR, "/"):
                self.take()
                factors.append(Node(Op.INVERT, (self.signed(),)))
            elif token.is_(Kind.OPERATOR, "bmod", "pmod"):
                factors = [self._modulo(multiply(factors))]
            elif self.starts_factor(token):
                factors.append(self.side_by_side(token))
            else:
                break
        return multiply(factors)

    def signed(self) -> Node:
        signs: list[str] = []
        while (token := self.peek()) is not None and token.is_(Kind.OPERATOR, "+", "-", "pm", "mp"):
            signs.append(self.take().text)
            if len(signs) > policy.MAX_DEPTH:
                raise TooBig("too many signs")
        node = self.power()
        if self.next_is_mixed_fraction(node):
            node = self.mixed(node)
        for sign in reversed(signs):
            node = with_sign(sign, node)
        return node

    def _modulo(self, value: Node) -> Node:
        self.take()
        return call("mod", value, self.signed())

    def starts_factor(self, token: Token) -> bool:
        if token.kind is Kind.OPERATOR:
            return token.text == "|" and self.open_bars == 0
        if token.kind is Kind.NAME:
            return token.text in ATOM_NAMES
        return token.kind in _FACTOR_START

    def side_by_side(self, token: Token) -> Node:
        before = self.tokens[self.position - 1]
        if token.kind is Kind.NUMBER and before.kind in (Kind.NUMBER, Kind.LETTER):
            raise Unreadable(f"number {token.text!r} after {before.text!r}"[:60])
        return self.power()

    # Mixed numbers

    def next_is_mixed_fraction(self, node: Node) -> bool:
        """Whether a proper numeric fraction follows an integer literal: 2 1/2, 2\\frac{1}{2}."""
        if node.op is not Op.NUMBER or self.tokens[self.position - 1].kind is not Kind.NUMBER:
            return False
        literal = node.literal
        if literal is None or literal.num_decimals is not None or not literal.text.isdigit():
            return False
        mark = self.position
        try:
            fraction = self._plain_fraction()
        except Unreadable:
            fraction = None
        self.position = mark
        return fraction is not None and 0 < fraction < 1

    def _plain_fraction(self) -> Fraction | None:
        """The value of a fraction of two integer literals that starts here."""
        if self.accept(Kind.NAME, "frac"):
            above, below = self.argument(split=True), self.argument(split=True)
        elif (
            (first := self.peek()) is not None
            and first.kind is Kind.NUMBER
            and first.spaced
            and (slash := self.peek(1)) is not None
            and slash.is_(Kind.OPERATOR, "/")
            and (last := self.peek(2)) is not None
            and last.kind is Kind.NUMBER
        ):
            self.position += 3
            above, below = (
                Node(Op.NUMBER, literal=first.literal),
                Node(Op.NUMBER, literal=last.literal),
            )
        else:
            return None
        if above.literal is None or below.literal is None or not below.literal.value:
            return None
        return above.literal.value / below.literal.value

    def mixed(self, whole: Node) -> Node:
        fraction = self._plain_fraction()
        assert fraction is not None
        node = Node(Op.ADD, (whole, number(fraction)))
        while (token := self.peek()) is not None and token.is_(Kind.OPERATOR, "%", "deg", "^"):
            if token.text == "^" and not self._is_degree_script():
                break
            node = self._postfix(node, self.take().text)
        return node

    def _is_degree_script(self) -> bool:
        script = [token.text for token in self.tokens[self.position + 1 : self.position + 4]]
        return script[:1] == ["deg"] or script == ["{", "deg", "{"]

    # Powers and postfix marks

    def power(self) -> Node:
        node = self.atom()
        marks = 0
        while (token := self.peek()) is not None and token.kind is Kind.OPERATOR:
            if token.text not in _POSTFIX:
                break
            marks += 1
            if marks > 8:
                raise TooBig("too many postfix marks")
            node = self._postfix(node, self.take().text)
        return node

    def _postfix(self, node: Node, mark: str) -> Node:
        if mark == "^":
            return self._raised(node)
        if mark == "_":
            return subscripted(node, self._subscript())
        if mark == "!":
            if self.accept(Kind.OPERATOR, "!"):
                return call("double_factorial", node)
            return call("factorial", node)
        if mark == "%":
            return Node(Op.PERCENT, (node,))
        if mark == "deg":
            return self._degrees(node)
        if mark == "transpose":
            return Node(Op.TRANSPOSE, (node,))
        return self._primed(node)

    def _raised(self, base: Node) -> Node:
        if self._script_is("deg"):
            return self._degrees(base)
        if base.op is Op.NUMBER and self._script_is("o"):
            return self._degrees(base)
        if contains(base, Op.MATRIX) and self._script_is("T", "transpose"):
            return Node(Op.TRANSPOSE, (base,))
        if self._script_is("'"):
            return self._primed(base)
        exponent = self.script()
        return Node(Op.POWER, (base, exponent))

    def _script_is(self, *texts: str) -> bool:
        """Whether the script is one of these marks; it is consumed if so."""
        token, ahead = self.peek(), 0
        if token is not None and token.is_(Kind.OPEN, "{"):
            token, ahead = self.peek(1), 1
        if token is None or token.text not in texts:
            return False
        if ahead:
            after = self.peek(2)
            if after is None or not after.is_(Kind.CLOSE, "{"):
                return False
        self.position += 1 + 2 * ahead
        return True

    def script(self) -> Node:
        """A superscript or a subscript: a group, or one signed atom with its own powers."""
        if self.next_is(Kind.OPEN, "{"):
            return self.group()
        if self.next_is(Kind.OPERATOR, "+", "-"):
            return with_sign(self.take().text, self.script())
        self.deeper()
        node = self.atom()
        if self.next_is(Kind.OPERATOR, "^"):  # x^y^z is read from the right
            self.take()
            node = Node(Op.POWER, (node, self.script()))
        self.depth -= 1
        return node

    def _subscript(self) -> Node:
        r"""An index; of one that is no expression (S_{\text{max}}) the text counts."""
        mark = self.position
        try:
            return self.script()
        except Unreadable:
            self.position = mark
            self.expect(Kind.OPEN, "{")
            name = ""
            while not self.accept(Kind.CLOSE, "{"):
                name += self.take().text
            return Node(Op.SYMBOL, name=f"index:{name}")

    def _degrees(self, node: Node) -> Node:
        """20^\\circ, with minutes and seconds of arc if they follow."""
        if node.op is Op.DEGREE:
            raise Unreadable("a second degree mark")
        total = node
        for mark, parts in (("'", 60), ("''", 3600)):
            value, prime = self.peek(), self.peek(1)
            is_second = (after := self.peek(2)) is not None and after.is_(Kind.OPERATOR, "'")
            if value is None or value.kind is not Kind.NUMBER or value.literal is None:
                break
            if prime is None or prime.text != "'" or is_second != (mark == "''"):
                break
            total = Node(Op.ADD, (total, number(value.literal.value / parts)))
            self.position += 2 + (mark == "''")
        return Node(Op.DEGREE, (total,))

    def _primed(self, node: Node) -> Node:
        if node.op not in (Op.SYMBOL, Op.APPLY):
            raise Unreadable("a prime after something that is not a name")
        primed = replace(node, name=node.name + "'")
        if node.op is Op.SYMBOL and self.next_is(Kind.OPEN, "("):
            return Node(Op.APPLY, tuple(self.parenthesized()), primed.name)
        return primed
