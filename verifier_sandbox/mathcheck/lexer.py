r"""Turn unified answer text into tokens.

Styling commands vanish here (`\left`, `\boldsymbol`, `\color{red}`), white space becomes a mark on
the next token, words become text tokens, and numbers are read whole. One pass over the text; an
unknown command raises Unreadable.
"""

from __future__ import annotations

import re
from dataclasses import replace

from . import policy, tokens, words
from .bare_words import function_prefix, looks_like_a_word
from .nodes import Literal
from .numbers import CommaRule, scan_number
from .result import TooBig, Unreadable
from .tokens import Kind, Token

_COMMAND = re.compile(r"\\([A-Za-z]+\*?|.)", re.DOTALL)
_LETTERS = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]{2,})*")
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}(?![\d-])|\d{1,2}/\d{1,2}/\d{4}(?![\d/])")
_SYMBOLS = {
    "<=": (Kind.RELATION, "<="), ">=": (Kind.RELATION, ">="), "!=": (Kind.RELATION, "!="),
    "==": (Kind.RELATION, "="), "=>": (Kind.RELATION, "=>"), "->": (Kind.RELATION, "->"),
    ":=": (Kind.RELATION, "="), "**": (Kind.OPERATOR, "^"), "\\\\": (Kind.CELL, "\\\\"),
    "<": (Kind.RELATION, "<"), ">": (Kind.RELATION, ">"), "=": (Kind.RELATION, "="),
    "+": (Kind.OPERATOR, "+"), "-": (Kind.OPERATOR, "-"), "*": (Kind.OPERATOR, "*"),
    "/": (Kind.OPERATOR, "/"), "^": (Kind.OPERATOR, "^"), "_": (Kind.OPERATOR, "_"),
    "!": (Kind.OPERATOR, "!"), "'": (Kind.OPERATOR, "'"), "%": (Kind.OPERATOR, "%"),
    "|": (Kind.OPERATOR, "|"), "(": (Kind.OPEN, "("), ")": (Kind.CLOSE, "("),
    "[": (Kind.OPEN, "["), "]": (Kind.CLOSE, "["), "{": (Kind.OPEN, "{"), "}": (Kind.CLOSE, "{"),
    ",": (Kind.SEPARATOR, ","), ";": (Kind.SEPARATOR, ";"), ":": (Kind.SEPARATOR, ":"),
    "&": (Kind.CELL, "&"),
    "¢": (Kind.TEXT, "cent"),
    "...": (Kind.DOTS, "..."), ".": (Kind.OPERATOR, "."),
}  # fmt: skip
_ONE_LETTER_WORDS = "аеорсухкміАВЕКМНОРСТХ"
_HOMOGLYPHS = dict(zip(_ONE_LETTER_WORDS, "aeopcyxkmiABEKMHOPCTX", strict=True))
_ASCII_WORDS = {"and": "and", "or": "or"}
_QUOTED_MATHS = re.compile(
    r"[\d\s+\-*/^=().,:;<>|!%$\\{}\[\]_]*[^\W\d_]?[\d\s+\-*/^=().,:;<>|!%$\\"
    r"{}\[\]_]*"
)
_ORDINAL_ENDINGS = frozenset(("st", "nd", "rd", "th"))
_ARTICLE = re.compile(r"[aA]\s+(?!and\b|or\b)[^\W\d_]{2}")
_HAN_OR_ASCII = re.compile(r"[\u2e80-\u9fff]+|[A-Za-z]+(?=[\u2e80-\u9fff])")
_ROW_GAP = re.compile(r"\[-?[\d.]+ ?(?:pt|em|ex|cm|mm)\]")
_OPTION = re.compile(r"\s*\[[^\]{}]{0,40}\]")


def tokenize(text: str, rule: CommaRule = CommaRule.DEFAULT) -> list[Token]:
    """The tokens of a unified text. Raises Unreadable or TooBig."""
    lexer = _Lexer(text, rule)
    lexer.run()
    return lexer.tokens


class _Lexer:
    def __init__(self, text: str, rule: CommaRule, quoted: bool = False, level: int = 0) -> None:
        if level > 4:
            raise TooBig("nested text commands")
        self.text, self.rule, self.quoted, self.level = text, rule, quoted, level
        self.position = 0
        self.depth = 0
        self.spaced = False
        self.tokens: list[Token] = []

    def run(self) -> None:
        while self.position < len(self.text):
            self._step(self.text[self.position])

    def _step(self, char: str) -> None:
        if char.isspace() or char == "~":
            self.spaced, self.position = True, self.position + 1
        elif char.isdigit() or (char == "." and self._next_is_digit()):
            self._number()
        elif char == "\\":
            self._command()
        elif char.isalpha():
            self._letters()
        elif char == "$":
            self._dollar()
        elif char in '"`':
            self.position += 1
        else:
            self._symbol()

    def _add(self, kind: Kind, text: str, literal: Literal | None = None) -> None:
        if len(self.tokens) >= policy.MAX_TOKENS:
            raise TooBig(f"more than {policy.MAX_TOKENS} tokens")
        if kind in (Kind.OPEN, Kind.BEGIN):
            self.depth += 1
        elif kind in (Kind.CLOSE, Kind.END):
            self.depth -= 1
        self.tokens.append(Token(kind, text, literal, self.spaced, self.quoted))
        self.spaced = False

    def _next_is_digit(self) -> bool:
        after = self.text[self.position + 1 : self.position + 2]
        return after.isdigit()

    def _number(self) -> None:
        if (date := _DATE.match(self.text, self.position)) is not None:
            self._add(Kind.TEXT, date.group())
            self.position = date.end()
            return
        # Inside a subscript or a plain group a comma separates nothing, so it still groups digits.
        found = scan_number(self.text, self.position, self.rule, bracketed=self.depth > 0)
        if found is None:
            raise Unreadable(f"digit {self.text[self.position]!r}")
        literal, end = found
        raw = self.text[self.position : end]
        self._add(Kind.NUMBER, raw, literal)
        self.position = end

    def _symbol(self) -> None:
        for length in (3, 2, 1):
            known = _SYMBOLS.get(self.text[self.position : self.position + length])
            if known is not None:
                if length == 2 and known[1] == "=" and not self.tokens:
                    raise Unreadable("== before an answer")
                self.position += length
                self._add(*known)
                return
        raise Unreadable(f"character {self.text[self.position]!r}")

    def _dollar(self) -> None:
        """A dollar sign: money if it is alone before a digit, a maths delimiter otherwise."""
        self.position += 1
        if self.text.count("$") == 1 and re.match(r"\s?\d", self.text[self.position :]):
            self._add(Kind.NAME, "dollar")
        else:
            self.spaced = True

    def _letters(self) -> None:
        match = _LETTERS.match(self.text, self.position)
        assert match is not None
        run = match.group()
        if (han := _HAN_OR_ASCII.match(run)) is not None:
            run = han.group()  # no word mixes the two: 选A, x或y
        if "-" in run and (run.isascii() and len(run.split("-")[0]) == 1):
            run = run.split("-")[0]  # x-cos is a difference, well-known is a word
        if run.isascii():
            run = self._ascii_run(run)
            self.position += len(run)
            return
        self.position += len(run)
        if run in _HOMOGLYPHS and not self.quoted:
            self._add(Kind.LETTER, _HOMOGLYPHS[run])
        else:
            self._word(run)

    def _ascii_run(self, run: str) -> str:
        """Add the tokens of a run of ASCII letters; return the part that was read."""
        if run == "min" and (self.quoted or self._follows_number()):
            self._word(run)  # minutes, not a minimum
        elif self.quoted and run in _ORDINAL_ENDINGS and self._follows_number():
            self._word(run)  # 4th, not a hyperbolic tangent
        elif run in tokens.FUNCTIONS:
            self._add(Kind.NAME, tokens.FUNCTIONS[run])
        elif run in ("pi", "infty", "oo", "Infinity"):
            self._add(Kind.NAME, tokens.CONSTANTS[run])
        elif len(run) == 1:
            self._single_letter(run)
        elif run in tokens.GREEK and run not in ("square", "triangle", "partial", "angle"):
            self._add(Kind.LETTER, tokens.greek_letter(run))
        elif self.quoted or looks_like_a_word(run):
            self._word(run)
        elif (name := function_prefix(run)) is not None:
            self._add(Kind.NAME, tokens.FUNCTIONS[name])
            return name
        else:
            for letter in run.split("-")[0].split("'")[0]:
                self._add(Kind.LETTER, letter)
            return run.split("-")[0].split("'")[0]
        return run

    def _follows_number(self) -> bool:
        return bool(self.tokens) and self.tokens[-1].kind is Kind.NUMBER

    def _ends_or_has_words(self) -> bool:
        """Whether nothing follows that could be an argument."""
        return re.match(r"\s*(?:$|[.,;)}]|\\text)", self.text[self.position :]) is not None

    def _single_letter(self, letter: str) -> None:
        between = self.quoted and self.spaced and self.text[self.position + 1 :][:1].isspace()
        if (between and letter in words.ONLY_QUOTED) or (
            self.quoted and letter in "aA" and _ARTICLE.match(self.text, self.position)
        ):
            self._word(letter)
        else:
            self._add(Kind.LETTER, letter)

    def _word(self, word: str) -> None:
        plain = word.casefold()
        if plain in words.AND:
            self._add(Kind.SEPARATOR, "and")
        elif plain in words.OR:
            self._add(Kind.SEPARATOR, "or")
        elif (
            self.tokens
            and self.tokens[-1].kind is Kind.TEXT
            and self.tokens[-1].text[0] not in ("0123456789")
        ):
            glue = " " if self.spaced or word.isascii() else ""
            self.tokens[-1] = self.tokens[-1].respelled(self.tokens[-1].text + glue + word)
            self.spaced = False
        else:
            self._add(Kind.TEXT, word)

    def _command(self) -> None:
        match = _COMMAND.match(self.text, self.position)
        if match is None:
            self.position += 1  # a lone backslash at the end
            return
        name = match.group(1)
        self.position = match.end()
        if name == "\\":
            self._add(Kind.CELL, "\\\\")
            if (gap := _ROW_GAP.match(self.text, self.position)) is not None:
                self.position = gap.end()
        elif name in tokens.SPACES:
            self.spaced = True
        elif name in tokens.TEXT_COMMANDS:
            self._quoted(name)
        elif name in ("begin", "end"):
            self._environment(name)
        elif name in tokens.STYLES:
            self._style(name)
        elif name in tokens.DROPPED_WITH_ARGUMENT or name in tokens.STYLES_AFTER_ARGUMENT:
            if (option := _OPTION.match(self.text, self.position)) is not None:
                self.position = option.end()
            self._argument()
        else:
            self._meaningful(name)

    def _style(self, name: str) -> None:
        """Drop a styling command; `\\left.` and `\\right.` draw nothing at all."""
        if name in ("left", "right") and self.text[self.position : self.position + 1] == ".":
            self.position += 1
        if name in ("boxed", "fbox"):
            self.spaced = True

    def _meaningful(self, name: str) -> None:
        if name == "sim" and not self.tokens:
            raise Unreadable(r"\sim before an answer")
        if name in tokens.RELATIONS:
            self._add(Kind.RELATION, tokens.RELATIONS[name])
        elif name == "not":
            self._negated_relation()
        elif name in tokens.SET_OPERATORS:
            self._add(Kind.SET_OPERATOR, tokens.SET_OPERATORS[name])
        elif name in tokens.BRACKETS:
            self._add(*tokens.BRACKETS[name])
        elif name in tokens.OPERATORS:
            self._add(Kind.OPERATOR, tokens.OPERATORS[name])
        elif name in tokens.DOTS:
            self._add(Kind.DOTS, "...")
        elif name in tokens.BUILDERS:
            self._add(Kind.NAME, tokens.BUILDERS[name])
        elif name == "min" and self._follows_number() and self._ends_or_has_words():
            self._word(name)  # minutes
        elif name in tokens.FUNCTIONS:
            self._add(Kind.NAME, tokens.FUNCTIONS[name])
        elif name in tokens.CONSTANTS:
            self._add(Kind.NAME, tokens.CONSTANTS[name])
        elif name in tokens.GREEK:
            self._add(Kind.LETTER, tokens.greek_letter(name))
        elif name in ("circ", "top", "intercal", "infty"):
            self._add(Kind.OPERATOR, {"circ": "deg"}.get(name, "transpose"))
        elif name in ("land", "wedge"):
            self._add(Kind.SEPARATOR, "and")
        elif name in ("lor", "vee"):
            self._add(Kind.SEPARATOR, "or")
        elif name in ("forall", "exists", "therefore", "because", "colon", "complement"):
            self._add(
                Kind.SEPARATOR if name == "colon" else Kind.TEXT, ":" if name == "colon" else name
            )
        elif name == "jmath":
            self._add(Kind.LETTER, "j")
        elif name == "#" or name == "&":
            raise Unreadable(f"\\{name}")
        else:
            raise Unreadable(f"unknown command \\{name}"[:60])

    def _negated_relation(self) -> None:
        rest = self.text[self.position :].lstrip()
        for spelled, relation in (("=", "!="), ("\\in", "notin"), ("<", ">="), (">", "<=")):
            if rest.startswith(spelled):
                self.position = len(self.text) - len(rest) + len(spelled)
                self._add(Kind.RELATION, relation)
                return
        self._add(Kind.TEXT, "not")

    def _argument(self) -> str:
        """The content of the group that follows; the group is consumed."""
        rest = self.text[self.position :]
        start = self.position + len(rest) - len(rest.lstrip())
        if self.text[start : start + 1] != "{":
            return ""
        depth, end = 0, start
        while end < len(self.text):
            char = self.text[end]
            if char == "\\":
                end += 2
                continue
            depth += (char == "{") - (char == "}")
            end += 1
            if depth == 0:
                self.position = end
                return self.text[start + 1 : end - 1]
        raise Unreadable("a group is not closed")

    def _environment(self, name: str) -> None:
        environment = self._argument().strip()
        known = tokens.MATRIX_ENVIRONMENTS | tokens.ROW_ENVIRONMENTS
        if environment not in known:
            raise Unreadable(f"environment {environment!r}"[:60])
        if environment == "array" and name == "begin":
            self._argument()
        self._add(Kind.BEGIN if name == "begin" else Kind.END, environment)

    def _quoted(self, name: str) -> None:
        """A text command: words, or mathematics that was only set upright."""
        content = self._argument()
        if not content.strip():
            self.spaced = True
            return
        bare = content.strip()
        if name == "operatorname" and bare in tokens.FUNCTIONS:
            self._add(Kind.NAME, tokens.FUNCTIONS[bare])
            return
        inner = _Lexer(content, self.rule, quoted=True, level=self.level + 1)
        inner.depth = self.depth
        inner.run()
        first = True
        if inner.tokens and self.spaced:
            inner.tokens[0] = replace(inner.tokens[0], spaced=True)
        for token in inner.tokens:
            if (
                token.kind is Kind.TEXT
                and first
                and self.tokens
                and (self.tokens[-1].kind is Kind.TEXT and self.tokens[-1].quoted)
            ):
                self.tokens[-1] = self.tokens[-1].respelled(f"{self.tokens[-1].text} {token.text}")
            else:
                self.tokens.append(token)
            first = False
        if content[-1].isspace():
            self.spaced = True
