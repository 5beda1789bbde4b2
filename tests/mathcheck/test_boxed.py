import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_sandbox.mathcheck import MathVerdict, check, last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{5} and \boxed{7}", "7"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{6,\boxed{5}}", r"6,\boxed{5}"),
        (r"\boxed{ \fbox{\boxed{5}} }", "5"),
        (r"\boxed{4} \boxed{-\boxed{5}} no", r"-\boxed{5}"),
        (r"\boxed{\boxed{5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"} \boxed{5}}", "5"),
        (r"{ \boxed{5}", "5"),
        (r"\boxed{5} \boxed{7", "5"),
        (r"\boxed{}", ""),
        (r"\\boxed{5}", None),
        (r"\boxedx{5}", None),
        (r"\boxed{5", None),
        (r"\boxed{5\}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_counts(text, content):
    assert last_boxed(text) == content


@given(st.text(alphabet=r"\{}bx 1", max_size=60))
def test_what_is_found_is_balanced(text):
    content = last_boxed(r"\boxed{1}" + text)
    assert content is not None
    depth, position = 0, 0
    while position < len(content):
        if content[position] == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(content[position], 0)
        assert depth >= 0
        position += 1
    assert depth == 0


def test_an_open_box_is_unreadable():
    assert check("7", r"\boxed{7").verdict is MathVerdict.UNREADABLE_PREDICTION


def test_an_empty_box_is_unreadable():
    assert check("7", r"\boxed{}").verdict is MathVerdict.UNREADABLE_PREDICTION


def test_only_the_last_box_is_graded():
    assert check("5", r"\boxed{5}, no, \boxed{7}").verdict is MathVerdict.WRONG
