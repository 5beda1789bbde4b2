"""Which tests a submission meets: a hash of the problem and the group decides."""

from hypothesis import given
from hypothesis import strategies as st

from verifier_sandbox.judge.draw import draw, draw_ids
from verifier_sandbox.protocol import JudgeRequest, Test

NAMES = st.text(max_size=12)


def request(source: str, **changes) -> JudgeRequest:
    tests = [Test(f"in {i}", f"out {i}") for i in range(100)]
    fields = {"tests": tests, "problem_id": "problem", "group": "step-7/prompt-3", **changes}
    return JudgeRequest(language="python", source=source, **fields)


def test_every_completion_of_a_group_meets_the_same_tests():
    drawn = {tuple(draw(request(f"print({i})"))[0]) for i in range(16)}
    assert len(drawn) == 1


def test_another_group_or_problem_meets_other_tests():
    draws = {tuple(draw_ids("p", f"group-{i}", 100, 20)) for i in range(50)}
    assert len(draws) == 50
    assert draw_ids("p", "g", 100, 20) != draw_ids("q", "g", 100, 20)


@given(problem=NAMES, group=NAMES, num_tests=st.integers(1, 200), num_wanted=st.integers(1, 40))
def test_a_draw_is_distinct_ascending_and_as_large_as_possible(
    problem, group, num_tests, num_wanted
):
    ids = draw_ids(problem, group, num_tests, num_wanted)
    assert ids == sorted(set(ids))
    assert len(ids) == min(num_tests, num_wanted)
    assert all(0 <= i < num_tests for i in ids)


def test_the_border_between_problem_and_group_counts():
    assert draw_ids("ab", "c", 1000, 20) != draw_ids("a", "bc", 1000, 20)


def test_the_draw_never_changes_between_releases():
    # A resumed run must meet the tests that it met before.
    assert draw_ids("problem", "group", 100, 5) == [8, 16, 50, 57, 59]


def test_every_test_is_equally_likely():
    counts = [0] * 40
    for i in range(4000):
        for test_id in draw_ids("p", str(i), 40, 20):
            counts[test_id] += 1
    # Binomial(4000, 1/2): five standard deviations are 158.
    assert max(abs(count - 2000) for count in counts) < 158


def test_tests_drawn_by_the_caller_are_kept_with_their_ids():
    tests = [Test("a", "b"), Test("c", "d")]
    ids, drawn = draw(request("x", tests=tests, test_ids=[30, 70]))
    assert (ids, drawn) == ([30, 70], tests)
