"""What counts as equal where graders differ, and every bound of the check. One place for both.

=====================  ==========================================================================
case                   what this package does
=====================  ==========================================================================
which box              the last balanced one; of nested boxes the outermost, with the inner ones
                       in place; an open box is no box
unit                   a different unit is wrong, also where a conversion would make it right;
                       a missing one is accepted; spelling and language of a unit do not matter,
                       the letters of a symbol do (mW, MW); 3 h 45 min is one quantity in two units
words after a number   units and listed nouns may be left out, and what the reference says itself;
                       any other word is wrong: dozen, tenths, squared, is false
percent                the sign may be dropped (28 for 28 %), or 28 % written 0.28; not x 100 both;
                       it may be added to a number from 1 on, which is no share
degree                 the sign may be dropped, and added to a number without pi; equal to the
                       same angle in radians; a trigonometric function reads it as an angle;
                       percent and degree are no other unit
base subscript         may be dropped (1010 for 1010_2), not added; another base is wrong if its
                       value differs
modulus                another one is wrong; a missing one is accepted with the same number
unevaluated            accepted when equal in value: 3+4 for 7, 2^{99} for its digits; an integral,
                       a limit or an infinite sum is not: it would answer with the question
rounded decimal        wrong for an exact reference; for a value without a finite decimal, 12
                       significant digits or more are accepted if all are right, rounded or cut
chain a = b = c        all sides must agree; a leading label (x, f(x), S_{AB}) is a name, not a
                       side; what follows \\approx must round the first side, the answer
hedge                  several values, "or", "not", an added condition: wrong, never ignored
or                     joins the roots of one unknown as a comma does; anywhere else it is no "and"
words before a value   labels of a closed list (area, answer, number of ways) say nothing else; any
                       other words before a colon or an equals sign are no answer to a bare value
choice                 (B) 12 is answered by B and by 12; where both sides say both, both count
steps and corners      a minimum, a floor, a remainder or 0^x of a symbol on one side only is
                       another function, whatever sample points say
label                  x = 5 answers 5 and 5 answers x = 5; y = 5 does not answer x = 5, nor do
                       |x| = 5, sin x = 5 and 2x = 10 answer 5; values with names answer a tuple in
                       the order of the names
i                      the imaginary unit, unless the reference uses it as an index or next to j, k
e                      Euler's number, unless the reference assigns or indexes it
log                    without a base: natural or decimal, the same one on both sides
sets, lists, tuples    sets and plain lists unordered, tuples ordered; a plain list in the order of
                       the tuple answers it; {a} answers a, but not inside a set; a list says each
                       value once for each time; an open interval is written as a pair
letters                AC is ordered, A, C is not; small letters are a product
+- signs               independent of each other; with -+ present they are linked
+ C                    the name of a constant of integration does not matter
thousands, decimals    1,234 and 1 234 and 1{,}234 are 1234; 12,34 is 12.34 only where the other
                       side is a decimal, else two values; 1.234,56 is 1234.56
words                  case, an article and the final full stop do not matter; number words and
                       scale words (million) are numbers; "no solution" is the empty set
a:b                    a ratio equals a fraction and its multiples; h:mm is a clock time unless it
                       is a reduced ratio
odd roots, powers p/q  real for negative bases when q is odd
domain                 points where one side is not real or not defined are not compared; that of
                       a parameter (k in Z) may be left out, that of x in x > 1 may not
=====================  ==========================================================================
"""

MAX_ANSWER_CHARS = 2000
"""A longer answer is TOO_BIG unless it is the reference, character by character."""
MAX_TOKENS = 800
"""Tokens of one answer."""
MAX_DEPTH = 40
"""Nesting of brackets, groups, roots and exponents in an expression."""
MAX_LITERAL_DIGITS = 2000
"""Digits of one number literal."""
MAX_ITEMS = 48
"""Elements of a list, tuple, set, union or matrix."""
MAX_EXACT_BITS = 100_000
"""Size of one integer in exact arithmetic: room for 2^99999 and 8000!."""
MAX_EXACT_WORK_BITS = 450_000
"""Sum of the sizes of all intermediate results of one exact evaluation."""
MAX_EXACT_FACTORIAL = 8000
MAX_TERMS = 300
r"""Terms of one \sum or \prod that are added up."""
MAX_WORK = 4_500
"""Work units of one check; a unit takes up to ten microseconds of CPU."""
MAX_PRECISION_BITS = 6000
"""Largest precision of a numeric comparison."""
PRECISION_BITS = 200
"""First precision of a comparison at one of several points (60 decimal digits)."""
CONSTANT_BITS = 300
"""The same for constants: there is one look at them, not one at each of several points."""
HEADROOM_BITS = 200
"""What a first look at constants and at huge or tiny values gets on top."""
MAX_FAR_BITS = 1600
"""Largest precision of a comparison at a point with huge or tiny values."""
EXACT_DECIMAL_DIGITS = 12
"""From this many significant digits on a decimal may stand for the infinite one it rounds."""
MAX_ROUNDED_DIGITS = 400
"""Significant digits of a decimal that is compared with the value it rounds."""
NUM_POINTS = 8
"""Seeded points at which expressions with symbols are compared."""
NUM_RATIOS = 6
"""Near points at which the ratio of two equations is compared."""
MIN_AGREEMENTS = 4
"""Points that must be defined on both sides and agree."""
