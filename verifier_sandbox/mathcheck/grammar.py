"""The tokens of an expression with a position, and the grammar that atoms recurse into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from . import policy
from .nodes import Node
from .result import TooBig, Unreadable
from .tokens import Kind, Token


class Grammar(ABC):
    """Takes tokens one by one. The abstract methods are the levels above an atom."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = list(tokens)
        self.position = 0
        self.depth = 0
        self.open_bars = 0

    # tokens

    def peek(self, ahead: int = 0) -> Token | None:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else None

    def next_is(self, kind: Kind, *texts: str) -> bool:
        token = self.peek()
        return token is not None and token.is_(kind, *texts)

    def take(self) -> Token:
        token = self.peek()
        if token is None:
            raise Unreadable("the expression ends too early")
        self.position += 1
        return token

    def accept(self, kind: Kind, *texts: str) -> bool:
        if self.next_is(kind, *texts):
            self.position += 1
            return True
        return False

    def deeper(self) -> None:
        """Enter one more level of nesting. Raises TooBig beyond `policy.MAX_DEPTH`."""
        self.depth += 1
        if self.depth > policy.MAX_DEPTH:
            raise TooBig(f"nesting deeper than {policy.MAX_DEPTH}")

    def expect(self, kind: Kind, text: str) -> None:
        if not self.accept(kind, text):
            raise Unreadable(f"{kind.value} {text!r} is missing")

    @abstractmethod
    def fraction_like(self) -> Node:
        """A whole group."""

    @abstractmethod
    def sum(self) -> Node:
        """Terms with + and - between them."""

    @abstractmethod
    def product(self) -> Node:
        """Factors with or without marks between them."""

    @abstractmethod
    def power(self) -> Node:
        """An atom with its superscripts and postfix marks."""

    @abstractmethod
    def script(self) -> Node:
        """What stands after ^ or _."""

    @abstractmethod
    def starts_factor(self, token: Token) -> bool:
        """Whether the token continues a product without a mark."""

    @abstractmethod
    def side_by_side(self, token: Token) -> Node:
        """The factor that starts here without a mark before it."""

    @abstractmethod
    def next_is_mixed_fraction(self, node: Node) -> bool:
        """Whether a fraction follows that makes a mixed number of an integer."""

    @abstractmethod
    def mixed(self, whole: Node) -> Node:
        """The mixed number that the integer starts."""
