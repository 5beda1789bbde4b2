from collections import Counter

import pytest

from megatron_magistral.rollout.source import PromptSource
from tests.fakes import problem_of

PROBLEMS = [problem_of(id=f"p{i}") for i in range(7)]


def ids(source: PromptSource, ordinals) -> list[str]:
    return [source.problem(ordinal).id for ordinal in ordinals]


def test_every_epoch_holds_every_problem_once():
    source = PromptSource(PROBLEMS, seed=3)
    for epoch in range(3):
        assert Counter(ids(source, range(7 * epoch, 7 * epoch + 7))) == Counter(
            problem.id for problem in PROBLEMS
        )


def test_epochs_differ_in_order():
    source = PromptSource(PROBLEMS, seed=3)
    assert ids(source, range(7)) != ids(source, range(7, 14))


def test_the_problem_depends_on_seed_and_ordinal_alone():
    forward = PromptSource(PROBLEMS, seed=3)
    backward = PromptSource(PROBLEMS, seed=3)
    ordinals = range(30)
    assert ids(forward, ordinals) == list(reversed(ids(backward, reversed(ordinals))))
    assert ids(forward, ordinals) != ids(PromptSource(PROBLEMS, seed=4), ordinals)


def test_no_problems_is_an_error():
    with pytest.raises(ValueError, match="no problems"):
        PromptSource([], seed=0)
