"""The pass rate of a problem is that of its latest groups, across interruptions."""

import pytest

from megatron_magistral.data.pass_rates import GroupResult, PassRates, read_pass_rates


def test_a_rate_is_the_share_that_was_solved(tmp_path):
    rates = PassRates(tmp_path / "rates.jsonl")
    rates.add(GroupResult(0, "a", num_graded=8, num_solved=2))
    rates.add(GroupResult(1, "b", num_graded=4, num_solved=4))
    rates.add(GroupResult(2, "a", num_graded=8, num_solved=4))
    assert rates.rates() == {"a": 6 / 16, "b": 1.0}


def test_only_the_latest_groups_count(tmp_path):
    rates = PassRates(tmp_path / "rates.jsonl")
    for ordinal, solved in enumerate([0, 0, 4, 6]):
        rates.add(GroupResult(ordinal, "a", 8, solved))
    assert rates.rates() == {"a": 10 / 16}


def test_the_latest_are_those_that_were_admitted_last_not_those_that_ended_last(tmp_path):
    rates = PassRates(tmp_path / "rates.jsonl")
    for ordinal, solved in [(7, 8), (9, 8), (2, 0)]:
        rates.add(GroupResult(ordinal, "a", 8, solved))
    assert rates.rates() == {"a": 1.0}


def test_a_group_without_a_grade_says_nothing(tmp_path):
    rates = PassRates(tmp_path / "rates.jsonl")
    rates.add(GroupResult(0, "a", 0, 0))
    assert rates.rates() == {}


def test_an_interrupted_run_goes_on_with_its_rates(tmp_path):
    path = tmp_path / "rates.jsonl"
    PassRates(path).add(GroupResult(0, "a", 8, 2))
    with path.open("ab") as file:
        file.write(b'{"ordinal":1,"prob')  # killed in the middle of a line
    assert read_pass_rates(path) == {"a": 0.25}
    rates = PassRates(path)
    rates.add(GroupResult(0, "a", 8, 6))  # rolled out again
    assert rates.rates() == read_pass_rates(path) == {"a": 0.75}


def test_a_file_that_is_not_there_is_an_error_for_a_reader(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_pass_rates(tmp_path / "absent.jsonl")
