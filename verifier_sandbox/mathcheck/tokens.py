"""Tokens of an answer, and the tables of LaTeX commands that the lexer knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from .name_tables import name_list, name_set
from .nodes import Literal


class Kind(Enum):
    """What a token is."""

    NUMBER = "number"
    LETTER = "letter"  # one variable, also a Greek one
    NAME = "name"  # a function, a constant or a LaTeX operator: sin, pi, frac, sum
    TEXT = "text"  # words
    OPERATOR = "operator"  # + - * / ^ _ ! ' % | deg pm mp
    RELATION = "relation"  # = != < > <= >= ~ === in
    SET_OPERATOR = "set operator"  # cup cap setminus
    SEPARATOR = "separator"  # , ; : and or
    OPEN = "open"  # ( [ \{ {
    CLOSE = "close"  # the same, closed
    BEGIN = "begin"  # an environment
    END = "end"
    CELL = "cell"  # & and \\
    DOTS = "dots"


@dataclass(frozen=True, slots=True)
class Token:
    """One token. `spaced` says that white space stood before it, `quoted` that it was in \\text."""

    kind: Kind
    text: str
    literal: Literal | None = None
    spaced: bool = False
    quoted: bool = False

    def is_(self, kind: Kind, *texts: str) -> bool:
        """Whether the token is of this kind, and one of these texts if any are given."""
        return self.kind is kind and (not texts or self.text in texts)

    def respelled(self, text: str) -> Token:
        """The same token with another text."""
        return replace(self, text=text)


RELATIONS = {
    "le": "<=", "leq": "<=", "leqslant": "<=", "leqq": "<=", "ge": ">=", "geq": ">=",
    "geqslant": ">=", "geqq": ">=", "lt": "<", "gt": ">", "ne": "!=", "neq": "!=",
    "approx": "~", "sim": "~", "simeq": "~", "cong": "~", "equiv": "===", "in": "in", "isin": "in",
    "notin": "notin", "nleq": ">", "ngeq": "<", "to": "->", "rightarrow": "->", "mapsto": "->",
    "Rightarrow": "=>", "implies": "=>", "Leftrightarrow": "<=>", "iff": "<=>", "subset": "subset",
    "subseteq": "subset", "coloneqq": "=", "ll": "<<", "gg": ">>", "parallel": "parallel",
    "perp": "perp", "propto": "propto",
}  # fmt: skip

SET_OPERATORS = {
    "cup": "cup",
    "bigcup": "cup",
    "cap": "cap",
    "bigcap": "cap",
    "setminus": "setminus",
    "backslash": "setminus",
    "smallsetminus": "setminus",
}

OPERATORS = {
    "times": "*", "cdot": "*", "ast": "*", "bullet": "*", "div": "/", "pm": "pm", "mp": "mp",
    "mid": "mid", "vert": "|", "lvert": "|", "rvert": "|", "prime": "'", "Vert": "||",
    "degree": "deg", "slash": "/", "choose": "choose", "bmod": "bmod", "pmod": "pmod",
    "mod": "bmod",
    "%": "%", "_": "_", "over": "over",
}  # fmt: skip

BRACKETS = {
    "lfloor": (Kind.OPEN, "floor"), "rfloor": (Kind.CLOSE, "floor"), "lceil": (Kind.OPEN, "ceil"),
    "rceil": (Kind.CLOSE, "ceil"), "langle": (Kind.OPEN, "angle"), "rangle": (Kind.CLOSE, "angle"),
    "lbrace": (Kind.OPEN, r"\{"), "rbrace": (Kind.CLOSE, r"\{"), "{": (Kind.OPEN, r"\{"),
    "}": (Kind.CLOSE, r"\{"), "lbrack": (Kind.OPEN, "["), "rbrack": (Kind.CLOSE, "["),
    "lparen": (Kind.OPEN, "("), "rparen": (Kind.CLOSE, "("),
}  # fmt: skip

# Function names and their canonical spelling. The same names are read without a backslash.
FUNCTIONS = {
    **{name: name for name in name_list(
        "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth",
        "sech csch arsinh arcosh artanh exp ln log gcd lcm max min det sgn cis floor ceil abs",
        "sqrt cbrt binom Re Im arg tr",
    )},
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "acot": "arccot", "tg": "tan",
    "ctg": "cot", "cotg": "cot", "arctg": "arctan", "arcctg": "arccot", "sh": "sinh", "ch": "cosh",
    "th": "tanh", "arcsinh": "arsinh", "arccosh": "arcosh", "arctanh": "artanh", "asinh": "arsinh",
    "acosh": "arcosh", "atanh": "artanh", "cosec": "csc", "lg": "lg", "lb": "lb", "HCF": "gcd",
    "GCD": "gcd", "LCM": "lcm", "sign": "sgn", "ceiling": "ceil", "trace": "tr", "dbinom": "binom",
    "tbinom": "binom", "exponential": "exp",
}  # fmt: skip

# LaTeX commands that build an expression.
BUILDERS = {
    "frac": "frac", "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "nicefrac": "frac",
    "sfrac": "frac", "flatfrac": "frac", "binom": "binom", "dbinom": "binom", "tbinom": "binom",
    "sqrt": "sqrt", "sum": "sum", "prod": "prod", "overline": "overline", "bar": "overline",
    "widebar": "overline", "dot": "dot", "vec": "vec", "hat": "hat", "widehat": "hat",
    "tilde": "tilde", "overrightarrow": "vec", "mathbb": "mathbb", "Bbb": "mathbb",
    "overarc": "arc", "wideparen": "arc", "overset": "overset", "stackrel": "overset",
}  # fmt: skip

CONSTANTS = {
    "pi": "pi", "infty": "infinity", "infin": "infinity", "emptyset": "emptyset",
    "varnothing": "emptyset", "euro": "euro", "pounds": "pound sterling", "yen": "yen",
    "ruble": "rouble", "rupee": "rupee", "$": "dollar", "textdollar": "dollar", "i": "i",
    "oo": "infinity", "Infinity": "infinity", "imath": "i", "exponentialE": "e", "R": "reals",
    "reals": "reals", "Reals": "reals",
}  # fmt: skip

CURRENCIES = frozenset(("euro", "pound sterling", "yen", "rouble", "rupee", "dollar"))

GREEK = name_set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa",
    "varkappa lambda mu nu xi rho varrho sigma varsigma tau upsilon phi varphi chi psi",
    "omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar angle",
    "triangle partial nabla measuredangle aleph square",
)
_GREEK_VARIANTS = {
    "varphi": "phi",
    "varepsilon": "epsilon",
    "vartheta": "theta",
    "ell": "l",
    "measuredangle": "angle",
}


def greek_letter(name: str) -> str:
    r"""One name for the variants of a letter (\varphi is \phi)."""
    return "\\" + _GREEK_VARIANTS[name] if name in _GREEK_VARIANTS else "\\" + name


TEXT_COMMANDS = name_set(
    "text mathrm textbf textit textrm textsf texttt textnormal mbox hbox mathsf mathtt",
    "operatorname operatorname* textup textmd emph rm unit si mathop",
)
# Commands that change only the look: dropped, what they apply to stays.
STYLES = name_set(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle",
    "displaystyle textstyle scriptstyle limits nolimits boldsymbol mathbf mathit bm bold",
    "bf it underline mathcal mathscr mathfrak mathnormal ensuremath boxed fbox underbrace",
    "overbrace large Large LARGE huge Huge small normalsize tiny hfill relax",
    "protect nonumber notag noindent centering phantom- mathopen mathclose mathrel",
    "mathbin mathord mathstrut strut framebox text- par",
)
SPACES = name_set(
    "quad qquad enspace thinspace medspace thickspace space hspace- newline , ; : ! >"
) | set(" \n\t/()[]")
# Commands dropped together with their argument in braces.
DROPPED_WITH_ARGUMENT = name_set(
    "color hspace vspace phantom hphantom vphantom label tag mspace kern rule ref"
)
STYLES_AFTER_ARGUMENT = frozenset(["textcolor", "colorbox", "fcolorbox"])
DOTS = name_set("ldots dots cdots dotsc dotsb vdots ddots")
MATRIX_ENVIRONMENTS = name_set("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array")
ROW_ENVIRONMENTS = name_set(
    "cases aligned align align* gathered gather split dcases rcases equation equation*", "eqnarray"
)
