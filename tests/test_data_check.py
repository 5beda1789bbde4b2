"""The files of later stages are checked with the others: readable, disjoint, ids of their own."""

from pathlib import Path

import pytest

from megatron_magistral.config_file import load
from megatron_magistral.data.schema import write_rows
from megatron_magistral.data_check import read_data
from tests.fakes import problem_of

TINY = Path(__file__).parent.parent / "configs" / "tiny.yaml"


def problems(*names):
    return [problem_of(f"What is {name}?", id=name) for name in names]


@pytest.fixture
def check(tmp_path):
    def check_files(**files):
        for name, rows in files.items():
            write_rows(tmp_path / name, rows)
        stages = f"[{{begin: {{max_steps: 1}}, add_problems: {tmp_path / 'harder'}}}]"
        config = load(
            TINY,
            [
                *("sft=null", "data.tiny_world=null", f"data.train={tmp_path / 'train'}"),
                *(f"data.held_out={tmp_path / 'held_out'}", f"rl.stages={stages}"),
            ],
        )
        return read_data(config)

    return check_files


def test_files_that_fit_together_are_read(check):
    rows, faults, warnings = check(
        train=problems("a"), harder=problems("b"), held_out=problems("c")
    )
    assert list(rows) == ["data.train", "data.held_out", "rl.stages.0.add_problems"]
    assert (faults, warnings) == ([], [])


def test_a_harder_problem_that_is_held_out_is_named(check, tmp_path):
    _, (fault,), _ = check(
        train=problems("a"), harder=problems("b", "c"), held_out=problems("c", "d")
    )
    assert fault == (
        f"data.held_out = {tmp_path}/held_out: 1 of its problems are in "
        f"rl.stages.0.add_problems = {tmp_path}/harder too, the first: 'What is c?'; "
        "what is trained on is not held out"
    )


def test_an_id_that_two_stages_use_is_named(check, tmp_path):
    _, (fault,), _ = check(
        train=problems("a", "b"), harder=problems("b", "c"), held_out=problems("d")
    )
    assert fault == (
        f"rl.stages.0.add_problems = {tmp_path}/harder: 1 of its ids are in data.train too, "
        "the first: 'b'; give each problem an id of its own"
    )


def test_a_file_of_a_stage_without_a_usable_row_is_named(check, tmp_path):
    _, (fault,), _ = check(train=problems("a"), harder=[], held_out=problems("d"))
    assert fault.startswith(f"rl.stages.0.add_problems = {tmp_path}/harder: holds no usable row")
