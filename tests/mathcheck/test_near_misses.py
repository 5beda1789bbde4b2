"""Answers that come as close to the reference as an attacker likes are wrong all the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_sandbox.mathcheck import MathVerdict, check

few = settings(max_examples=40, deadline=None)


def is_correct(reference: str, prediction: str) -> bool:
    return check(reference, prediction).verdict is MathVerdict.CORRECT


@few
@given(
    st.integers(1, 2000),
    st.sampled_from(
        [
            ("1", r"\cos(10^{{-{k}}})"),
            ("1", r"2^{{10^{{-{k}}}}}"),
            (r"\pi", r"\pi+10^{{-{k}}}"),
            ("0", r"\pi\cdot10^{{-{k}}}"),
            ("2", r"\sqrt{{4+10^{{-{k}}}}}"),
            (r"\frac{\pi}{2}", r"\arctan(10^{{{k}}})"),
            ("1", r"(1+10^{{-{k}}}\pi)(1-10^{{-{k}}}\pi)"),
            ("x", r"x+\frac{{1}}{{10^{{{k}}}}}"),
            ("[0,1]", r"[0,1+10^{{-{k}}}]"),
            ("y=x", r"y=x+10^{{-{k}}}"),
        ]
    ),
)
def test_no_difference_is_too_small_to_be_seen(exponent, pair):
    reference, near = pair
    assert not is_correct(reference, near.format(k=exponent))


@pytest.mark.parametrize("x", range(1, 400, 37))
def test_a_hyperbolic_tangent_is_never_one(x):
    assert not is_correct("1", rf"\tanh({x})")
    assert not is_correct(rf"\cosh({x})", rf"\sinh({x})")


@few
@given(st.integers(3, 60))
def test_a_convergent_of_a_root_is_not_the_root(length):
    above, below = 1, 1
    for _ in range(length):
        above, below = above + 2 * below, above + below
    fraction = rf"\frac{{{above}}}{{{below}}}"
    assert not is_correct(r"\sqrt{2}", fraction)
    assert not is_correct(r"\sqrt{2}x", rf"{fraction}x")


@few
@given(st.integers(0, 8), st.integers(1, 9))
def test_functions_that_differ_only_far_away_differ(exponent, digit):
    bound = digit * 10**exponent
    assert not is_correct("x", rf"\max(x,-{bound})")
    assert not is_correct("x", rf"\min(x,{bound})")


@few
@given(st.integers(2, 9), st.integers(0, 8), st.integers(0, 8))
def test_residue_classes_are_told_apart(modulus, left, right):
    sets = [rf"\{{{modulus}k+{r}:k\in\mathbb{{Z}}\}}" for r in (left, right)]
    assert is_correct(*sets) == (left == right)


@few
@given(st.integers(13, 40), st.integers(1, 9))
def test_a_long_decimal_must_be_right_in_every_digit(num_digits, error):
    third = "0." + "3" * num_digits
    assert is_correct(r"\frac{1}{3}", third)
    assert not is_correct(r"\frac{1}{3}", third[:-1] + str((3 + error) % 10))
    assert not is_correct(r"\frac{1}{4}", "0.25" + "0" * num_digits + str(error))


@few
@given(st.permutations("ABCD"), st.permutations("ABCD"))
def test_letters_written_together_are_an_order(left, right):
    orders = "".join(left), "".join(right)
    assert is_correct(*orders) == (orders[0] == orders[1])


@few
@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz", min_size=9, max_size=14))
def test_a_number_with_unknown_words_is_not_the_number(word):
    assert not is_correct("5", rf"5\text{{ {word}}}")
    assert not is_correct("5", rf"5\text{{ apples {word}}}")
    assert is_correct(rf"5\text{{ {word}}}", "5")
