"""The atoms of an expression: numbers, names, brackets, roots, functions, sums, matrices."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from . import policy
from .functions import CLOSERS, UNKNOWN_FUNCTIONS, apply_function, constant, has_only_numbers
from .grammar import Grammar
from .nodes import Literal, Node, Op, call, number
from .result import TooBig, Unreadable
from .tokens import Kind, Token


class AtomParser(Grammar):
    """Reads one atom; recurses into the whole grammar for what is inside it."""

    def atom(self) -> Node:
        token = self.take()
        if token.kind is Kind.NUMBER:
            return Node(Op.NUMBER, literal=token.literal)
        if token.kind is Kind.LETTER:
            return self._letter(token)
        if token.kind is Kind.NAME:
            return self._name(token)
        if token.kind is Kind.OPEN:
            self.position -= 1
            return self._bracketed()
        if token.kind is Kind.BEGIN:
            return self._matrix(token.text)
        if token.is_(Kind.OPERATOR, "|", "||"):
            return self._absolute(token.text)
        raise Unreadable(f"{token.kind.value} {token.text!r} where a value should be"[:60])

    def _letter(self, token: Token) -> Node:
        if token.text in ("e", "i"):
            return Node(Op.CONSTANT, name=token.text)
        if token.text in UNKNOWN_FUNCTIONS and self.next_is(Kind.OPEN, "("):
            return Node(Op.APPLY, tuple(self.parenthesized()), token.text)
        if token.text in ("C", "P", "A") and (chosen := self._combinations(token.text)) is not None:
            return chosen
        if token.text in ("\\angle", "\\triangle"):
            name = token.text
            while self.next_is(Kind.LETTER):
                name += self.take().text
            return Node(Op.SYMBOL, name=name)
        return Node(Op.SYMBOL, name=token.text)

    def _combinations(self, letter: str) -> Node | None:
        """C(10, 3), C_{10}^3 and the like with integer literals; None if it is something else."""
        mark = self.position
        name = "binom" if letter == "C" else "permutations"
        try:
            if self.next_is(Kind.OPEN, "(") and letter != "A":
                args = self.parenthesized()
            elif self.accept(Kind.OPERATOR, "_"):
                below = self.script()
                self.expect(Kind.OPERATOR, "^")
                args = [below, self.script()]
            elif self.accept(Kind.OPERATOR, "^"):
                above = self.script()
                self.expect(Kind.OPERATOR, "_")
                args = [self.script(), above]
            else:
                return None
            if len(args) == 2 and (letter == "C" or all(map(has_only_numbers, args))):
                return call(name, *args)
        except Unreadable:
            pass
        self.position = mark
        return None

    def _bracketed(self) -> Node:
        token = self.peek()
        assert token is not None
        if token.text == "{":
            return self.group()
        self.take()
        node = self.sum()
        self.expect(Kind.CLOSE, token.text)
        if token.text in ("floor", "ceil"):
            return call(token.text, node)
        if token.text in ("angle", r"\{"):
            raise Unreadable(f"bracket {token.text!r} inside an expression")
        return node

    def group(self) -> Node:
        self.expect(Kind.OPEN, "{")
        bars, self.open_bars = self.open_bars, 0
        node = self.fraction_like()
        self.open_bars = bars
        self.expect(Kind.CLOSE, "{")
        return node

    def _absolute(self, bar: str) -> Node:
        self.open_bars += 1
        node = self.sum()
        self.open_bars -= 1
        self.expect(Kind.OPERATOR, bar)
        return call("abs", node)

    def parenthesized(self) -> list[Node]:
        """Arguments in parentheses or in a group, separated by commas."""
        opening = self.take()
        bars, self.open_bars = self.open_bars, 0
        args = [self.sum()]
        while self.accept(Kind.SEPARATOR, ",", ";"):
            args.append(self.sum())
        self.open_bars = bars
        self.expect(Kind.CLOSE, opening.text)
        return args

    def argument(self, *, split: bool = False) -> Node:
        """An argument of a LaTeX command: a group or one token (one digit of a number)."""
        if self.next_is(Kind.OPEN, "{"):
            return self.group()
        token = self.peek()
        if split and token is not None and token.kind is Kind.NUMBER and len(token.text) > 1:
            if not token.text.isdigit():
                raise Unreadable("a number without braces as an argument")
            first, rest = token.text[0], token.text[1:]
            self.tokens[self.position : self.position + 1] = [
                replace(token, text=part, literal=Literal(Fraction(int(part)), None, 1, part))
                for part in (first, rest)
            ]
        self.deeper()
        node = self.atom()
        self.depth -= 1
        return node

    def _name(self, token: Token) -> Node:
        name = token.text
        if name == "frac":
            above, below = self.argument(split=True), self.argument(split=True)
            return Node(Op.MULTIPLY, (above, Node(Op.INVERT, (below,))))
        if name == "binom" and self.next_is(Kind.OPEN, "("):
            return call("binom", *self.parenthesized())
        if name == "binom":
            return call("binom", self.argument(split=True), self.argument(split=True))
        if name == "sqrt":
            return self._root()
        if name in ("sum", "prod"):
            return self._big_operator(Op.SUM if name == "sum" else Op.PRODUCT)
        if name in ("overline", "vec", "hat", "tilde", "dot", "arc"):
            return self._decorated(name)
        if (value := constant(name)) is not None:
            return value
        if name in CLOSERS:
            raise Unreadable(f"\\{name} inside an expression")
        return self._function(name)

    def _root(self) -> Node:
        index = number(2)
        if self.accept(Kind.OPEN, "["):
            index = self.sum()
            self.expect(Kind.CLOSE, "[")
        if self.next_is(Kind.OPEN, "("):
            return Node(Op.ROOT, (self._bracketed(), index))
        return Node(Op.ROOT, (self.argument(), index))

    def _decorated(self, name: str) -> Node:
        """A name with a mark over it, such as \\overline{AB}: one symbol, not a product."""
        start = self.position
        self.argument()
        inside = "".join(token.text for token in self.tokens[start : self.position])
        if name in ("hat", "vec") and inside.strip("{}") in ("i", "j", "k"):
            unit_vector = inside.strip("{}")
            return constant(unit_vector) or Node(Op.SYMBOL, name=unit_vector)
        return Node(Op.SYMBOL, name=f"{name}:{inside.strip('{}')}")

    def _big_operator(self, op: Op) -> Node:
        self.expect(Kind.OPERATOR, "_")
        self.expect(Kind.OPEN, "{")
        index = self.take()
        if index.kind is not Kind.LETTER:
            raise Unreadable("the index of a sum is not a letter")
        self.expect(Kind.RELATION, "=")
        begin = self.sum()
        self.expect(Kind.CLOSE, "{")
        self.expect(Kind.OPERATOR, "^")
        end = self.script()
        if any(part.name == "infinity" for bound in (begin, end) for part in bound.walk()):
            raise Unreadable("an infinite sum or product")
        term = self.product()
        return Node(op, (begin, end, term), index.text)

    def _function(self, name: str) -> Node:
        base: Node | None = None
        exponent: Node | None = None
        while self.next_is(Kind.OPERATOR, "_", "^"):
            if self.take().text == "_":
                base = self.argument(split=True) if self._ends_in_number() else self.script()
            else:
                exponent = self.script()
        return apply_function(name, self._function_arguments(name), base, exponent)

    def _ends_in_number(self) -> bool:
        r"""Whether a number is all that follows: \\log_28 is \\log_2 8, as TeX reads it."""
        return self.next_is(Kind.NUMBER) and self.peek(1) is None

    def _function_arguments(self, name: str) -> list[Node]:
        self.deeper()
        if self.next_is(Kind.OPEN, "("):
            args = self.parenthesized()
        elif self.next_is(Kind.OPEN, "{", "["):
            args = [self._bracketed()]
        elif self.next_is(Kind.OPERATOR, "+", "-"):
            args = [with_sign(self.take().text, self._bare_argument())]
        else:
            args = [self._bare_argument()]
        self.depth -= 1
        return args

    def _bare_argument(self) -> Node:
        r"""The argument of \sin 2x: factors side by side, up to an operator or a function."""
        first = self.power()
        factors = [self.mixed(first) if self.next_is_mixed_fraction(first) else first]
        while (token := self.peek()) is not None and self.starts_factor(token):
            if token.kind is Kind.NAME and token.text not in ("pi", "frac", "sqrt"):
                break
            factors.append(self.side_by_side(token))
        # A quotient of bare factors by a number stays outside: \sin x/2 is (\sin x)/2.
        return multiply(factors)

    def _matrix(self, environment: str) -> Node:
        rows: list[Node] = []
        cells: list[Node] = []
        while not self.next_is(Kind.END, environment):
            if self.accept(Kind.CELL, "\\\\"):
                rows.append(Node(Op.MATRIX_ROW, tuple(cells)))
                cells = []
            elif not self.accept(Kind.CELL, "&"):
                cells.append(self.sum())
            if len(rows) * max(1, len(cells)) > policy.MAX_ITEMS or len(rows) > policy.MAX_ITEMS:
                raise TooBig(f"a matrix of more than {policy.MAX_ITEMS} cells")
        self.take()
        if cells:
            rows.append(Node(Op.MATRIX_ROW, tuple(cells)))
        if not rows or len({len(row.args) for row in rows}) != 1:
            raise Unreadable("rows of a matrix differ in length")
        matrix = Node(Op.MATRIX, tuple(rows))
        return call("det", matrix) if environment == "vmatrix" else matrix


def with_sign(sign: str, node: Node) -> Node:
    """The node with the sign before it; +- and -+ stay marks."""
    if sign == "+":
        return node
    if sign == "-":
        return Node(Op.NEGATE, (node,))
    return Node(Op.PLUS_MINUS, (node,), sign)


def multiply(factors: list[Node]) -> Node:
    """The product of the factors; one factor is itself."""
    return factors[0] if len(factors) == 1 else Node(Op.MULTIPLY, tuple(factors))
