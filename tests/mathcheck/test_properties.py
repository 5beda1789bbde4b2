"""What must hold for any answer: reflexivity, symmetry, rewrites that keep, changes that break."""

import re

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verifier_sandbox.mathcheck import MathVerdict, check

few = settings(max_examples=80, deadline=None)

integers = st.integers(-999, 999).map(str)
atoms = st.one_of(
    st.integers(1, 99).map(str),
    st.sampled_from(["x", "y", r"\pi", r"\sqrt{2}", r"\sqrt{x^2+1}", "x^2", r"\alpha", "a_1"]),
)


def compounds(inner):
    pair = st.tuples(inner, inner)
    return st.one_of(
        pair.map(lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}"),
        pair.map(lambda p: rf"({p[0]}+{p[1]})"),
        pair.map(lambda p: rf"({p[0]}-{p[1]})"),
        pair.map(lambda p: rf"({p[0]})({p[1]})"),
        inner.map(lambda a: rf"({a})^{{2}}"),
        inner.map(lambda a: rf"\sin({a})"),
    )


expressions = st.recursive(atoms, compounds, max_leaves=5)
numbers = st.one_of(
    integers,
    st.tuples(integers, st.integers(2, 99)).map(lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}"),
    st.tuples(st.integers(0, 999), st.integers(1, 99)).map(lambda p: f"{p[0]}.{p[1]:02d}"),
)
answers = st.one_of(
    expressions,
    numbers,
    st.lists(integers, min_size=2, max_size=5).map(lambda xs: r"\{" + ",".join(xs) + r"\}"),
    st.lists(numbers, min_size=2, max_size=4).map(lambda xs: "(" + ", ".join(xs) + ")"),
    st.tuples(st.integers(-9, 0), st.integers(1, 9)).map(lambda p: f"[{p[0]}, {p[1]})"),
    st.tuples(st.sampled_from("xyz"), numbers).map(lambda p: f"{p[0]}={p[1]}"),
    st.tuples(st.sampled_from("xyz"), numbers).map(lambda p: rf"{p[0]}\le {p[1]}"),
    st.sampled_from([r"\text{even}", "B", r"90^\circ", r"28\%", "1010_2", "3:2", r"5\text{ cm}"]),
)

REWRITES = (
    lambda a: f"${a}$",
    lambda a: rf"\boxed{{{a}}}",
    lambda a: f" {a} ",
    lambda a: f"{a}.",
    lambda a: rf"\displaystyle {a}",
    lambda a: a.replace(r"\frac", r"\dfrac"),
    lambda a: a.replace("+", " + ").replace("=", " = "),
    lambda a: re.sub(r"([0-9x)])(?=[+-])", r"\1\\,", a),
)


def verdict(reference: str, prediction: str) -> MathVerdict:
    return check(reference, prediction).verdict


@few
@given(answers)
def test_an_answer_equals_itself(answer):
    assert verdict(answer, answer) is MathVerdict.CORRECT


@few
@given(expressions)
def test_an_expression_equals_itself_also_by_value(expression):
    assume("-" not in expression)  # x - x as a denominator is defined nowhere
    assert verdict(expression, f"0+{expression}") is MathVerdict.CORRECT


@few
@given(answers, answers)
def test_equality_is_symmetric(left, right):
    assert verdict(left, right) is verdict(right, left)


@few
@given(answers, st.sampled_from(REWRITES))
def test_a_rewrite_keeps_the_verdict(answer, rewrite):
    assert verdict(answer, rewrite(answer)) is MathVerdict.CORRECT


@few
@given(expressions, expressions)
def test_sums_and_products_commute(left, right):
    assume("-" not in left + right)
    assert verdict(f"{left}+{right}", f"{right}+{left}") is MathVerdict.CORRECT
    assert verdict(f"({left})({right})", f"({right})({left})") is MathVerdict.CORRECT


@few
@given(expressions)
def test_adding_one_breaks_equality(expression):
    assert verdict(expression, f"{expression}+1") is not MathVerdict.CORRECT


@few
@given(st.integers(1, 10**30))
def test_the_next_integer_is_wrong(value):
    assert verdict(str(value), str(value + 1)) is MathVerdict.WRONG
    assert verdict(str(value), f"{value + 1}.0") is MathVerdict.WRONG


@few
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_a_fraction_equals_its_multiples_and_not_its_neighbours(above, below):
    reference = rf"\frac{{{above}}}{{{below}}}"
    assert verdict(reference, f"{3 * above}/{3 * below}") is MathVerdict.CORRECT
    assert verdict(reference, f"{above + 1}/{below}") is MathVerdict.WRONG


@few
@given(st.integers(1000, 10**12))
def test_thousands_marks_do_not_change_a_number(value):
    for mark in (",", r"\,", "{,}", " ", "\u202f"):
        assert verdict(str(value), f"{value:,}".replace(",", mark)) is MathVerdict.CORRECT


@few
@given(st.lists(integers, min_size=2, max_size=6, unique=True), st.randoms())
def test_sets_are_unordered_and_tuples_ordered(items, random):
    shuffled = random.sample(items, len(items))
    as_set = [r"\{" + ",".join(x) + r"\}" for x in (items, shuffled)]
    as_tuple = ["(" + ",".join(x) + ")" for x in (items, shuffled)]
    assert verdict(*as_set) is MathVerdict.CORRECT
    assert (verdict(*as_tuple) is MathVerdict.CORRECT) == (items == shuffled)


@few
@given(st.lists(integers, min_size=2, max_size=6, unique=True))
def test_naming_further_values_is_wrong(items):
    hedges = (", ".join(items), r" \text{ or } ".join(items), r"\{" + ",".join(items) + r"\}")
    for hedge in hedges:
        assert verdict(items[0], hedge) is not MathVerdict.CORRECT


@few
@given(st.integers(1, 99), st.integers(1, 99), st.sampled_from(["<", r"\le", ">", r"\ge"]))
def test_an_inequality_equals_its_interval_and_no_other(low, width, relation):
    high = low + width
    closing = "]" if "e" in relation else ")"
    below = rf"(-\infty,{high}{closing}"
    above = ("[" if "e" in relation else "(") + rf"{high},\infty)"
    same, other = (below, above) if relation in ("<", r"\le") else (above, below)
    assert verdict(f"x {relation} {high}", same) is MathVerdict.CORRECT
    assert verdict(f"x {relation} {high}", other) is MathVerdict.WRONG
    assert verdict(f"x {relation} {high}", same.replace(str(high), str(high + 1))) is (
        MathVerdict.WRONG
    )


@few
@given(st.integers(2, 400), st.integers(2, 400), st.integers(2, 9))
def test_powers_are_compared_exactly(first, second, base):
    same = first == second
    powers = f"{base}^{{{first}}}", f"{base}^{{{second}}}"
    assert (verdict(*powers) is MathVerdict.CORRECT) == same
    assert verdict(powers[0], str(base**first)) is MathVerdict.CORRECT
    assert verdict(powers[0], powers[0] + "+1") is MathVerdict.WRONG
    assert verdict(rf"\frac{{1}}{{{powers[0]}}}", f"{base}^{{-{first}}}") is MathVerdict.CORRECT
