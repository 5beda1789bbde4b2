"""Stages begin by rule and change everything between two steps; a resume lands in the right one."""

import logging

import pytest

from megatron_magistral.algorithm.curriculum import Rule
from megatron_magistral.config import Config
from megatron_magistral.data.pass_rates import PassRates
from megatron_magistral.rollout.events import How, Outcome
from megatron_magistral.rollout.source import PromptSource
from megatron_magistral.rollout.stages import NoProblemsLeft, Stages
from megatron_magistral.types import Group
from tests.fakes import graded_of, problem_of

EASY = [problem_of(id=f"easy{i}") for i in range(5)]
HARD = [problem_of(id=f"hard{i}") for i in range(3)]
HARDEST = [problem_of(id=f"hardest{i}") for i in range(2)]
PROBLEMS = (EASY, HARD, HARDEST)

CONFIG = {
    "model": {"shape": {}},
    "data": {"tiny_world": {}},
    "reward": {"l_max": 64, "l_cache": 16},
    "rl": {
        "num_steps": 99,
        "group_size": 2,
        "n_batch": 8,
        "n_minibatch": 8,
        "n_async": 8,
        "kv_budget_tokens": 900,
        "kv_reserve": 0.5,
        "microbatch_tokens": 512,
        "optimizer": {"lr": 1.0},
        "stages": [
            {
                "begin": {"max_near_l_max": 0.5, "window": 2},
                "l_max": 96,
                "n_batch": 4,
                "n_minibatch": 4,
                "n_async": 6,
                "kv_budget_tokens": 700,
                "kv_reserve": 1.0,
                "drop_solved_above": 0.9,
            },
            {"begin": {"max_steps": 2}, "l_max": 128},
        ],
    },
}


@pytest.fixture
def open_stages(tmp_path):
    """Opens the curriculum of one run as a process would, with what is on the disk."""

    def open_them(step=0, how=How.REPEATED, problems=PROBLEMS, **rl) -> Stages:
        config = Config.model_validate(CONFIG | {"rl": CONFIG["rl"] | rl})
        rates = PassRates(tmp_path / "pass_rates.jsonl")
        stages = Stages(config, problems, tmp_path / "curriculum.jsonl", rates)
        stages.restore(step, how)
        return stages

    return open_them


def group(ordinal, problem=EASY[0], *, num_tokens=10, rewards=(0.0, 1.0)):
    members = (graded_of(r, num_tokens, passed_fraction=r) for r in rewards)
    return Group(ordinal, problem, tuple(members))


def long_step(stages, step, *, next_ordinal=10):
    """A step whose completions are near l_max."""
    stages.group_done(group(step, num_tokens=60), Outcome.TAKEN)
    return stages.step_trained(step, next_ordinal)


def test_everything_changes_with_the_step_that_follows(open_stages):
    stages = open_stages()
    assert long_step(stages, 0) is False
    before = stages.config
    assert long_step(stages, 1) is True
    assert stages.index == 1
    assert (before.reward.l_max, before.rl.n_batch, before.rl.n_async) == (64, 8, 8)
    now = stages.config
    assert (now.reward.l_max, now.rl.n_batch, now.rl.n_minibatch, now.rl.n_async) == (96, 4, 4, 6)


def test_the_log_says_which_rule_with_the_numbers(open_stages, caplog):
    caplog.set_level(logging.INFO)
    stages = open_stages()
    long_step(stages, 0)
    long_step(stages, 1)
    assert (
        "stage 1 begins with step 2, by the rule near l_max: 4 of 4 completions had more than "
        "l_max - l_cache tokens in steps 0 to 1: 1.0000, more than 0.5; l_max 64 -> 96, "
        "n_async 8 -> 6, n_batch 8 -> 4, n_minibatch 8 -> 4, queue_capacity 8 -> 4, "
        "kv_budget_tokens 900 -> 700, kv_reserve 0.5 -> 1.0; "
        "3 problems come in, 0 that are solved go out, 8 are left"
    ) in caplog.text


def test_a_group_keeps_the_stage_that_it_was_admitted_in(open_stages):
    stages = open_stages()
    long_step(stages, 0)
    long_step(stages, 1, next_ordinal=10)
    assert [stages.stage_of(ordinal) for ordinal in (0, 9, 10, 500)] == [0, 0, 1, 1]
    assert (stages.at(9).reward.l_max, stages.at(10).reward.l_max) == (64, 96)


def test_harder_problems_come_in_and_solved_ones_go_out(open_stages):
    stages = open_stages()
    stages.group_done(group(0, EASY[1], num_tokens=60, rewards=(1.0, 1.0)), Outcome.DROPPED)
    stages.group_done(group(1, EASY[2], num_tokens=60, rewards=(0.0, 1.0)), Outcome.TAKEN)
    stages.step_trained(0, 10)
    long_step(stages, 1, next_ordinal=10)
    seen = {stages.problem(ordinal).id for ordinal in range(10, 10 + 7)}
    assert seen == {p.id for p in (*EASY, *HARD)} - {"easy1"}
    assert stages.metrics() == {"stage_index": 1.0, "stage_problems": 7.0}


def test_problems_are_a_function_of_seed_stage_and_place(open_stages):
    stages = open_stages()
    first = PromptSource(EASY, seed=0)
    assert [stages.problem(i) for i in range(9)] == [first.problem(i) for i in range(9)]
    long_step(stages, 0)
    long_step(stages, 1, next_ordinal=9)
    assert [stages.problem(i) for i in range(9)] == [first.problem(i) for i in range(9)]
    before = [stages.problem(i) for i in range(9, 99)]
    again = open_stages(step=2)
    assert [again.problem(i) for i in range(9, 99)] == before


def test_only_groups_of_the_present_stage_count(open_stages):
    stages = open_stages()
    long_step(stages, 0)
    long_step(stages, 1, next_ordinal=10)
    stages.group_done(group(3, num_tokens=60), Outcome.TAKEN)  # was under way
    stages.group_done(group(10, num_tokens=90), Outcome.DROPPED)
    stages.step_trained(2, 20)
    reopened = open_stages(step=3)
    tally = reopened._steps[2]
    assert (tally.num_completions, tally.num_near_l_max) == (2, 2)
    assert (tally.num_groups, tally.num_dropped) == (1, 1)


def test_rules_of_a_stage_see_its_own_steps_alone(open_stages):
    stages = open_stages()
    long_step(stages, 0)
    long_step(stages, 1)
    assert stages.step_trained(2, 30) is False
    assert stages.step_trained(3, 30) is True  # two steps of stage 1
    assert [began.rule for began in stages._begins] == [Rule.NEAR_L_MAX, Rule.STEP]
    assert all(not stages.step_trained(step, 30) for step in range(4, 50))


@pytest.mark.parametrize("killed_in_line", [False, True])
def test_a_resume_lands_in_the_stage_that_it_left(open_stages, tmp_path, killed_in_line):
    stages = open_stages()
    long_step(stages, 0)
    long_step(stages, 1)
    stages.step_trained(2, 30)
    if killed_in_line:
        with (tmp_path / "curriculum.jsonl").open("ab") as file:
            file.write(b'{"type":"step","st')
    resumed = open_stages(step=3)
    assert (resumed.index, resumed.num_problems) == (1, 8)
    assert resumed.step_trained(3, 30) is True  # the second step of two


def test_steps_that_are_repeated_decide_nothing_again(open_stages):
    stages = open_stages()
    long_step(stages, 0)
    long_step(stages, 1)
    stages.step_trained(2, 30)
    resumed = open_stages(step=1, how=How.REPEATED)
    assert resumed.index == 1
    assert [resumed.step_trained(step, 30) for step in (1, 2)] == [False, False]
    assert resumed.step_trained(3, 30) is True


def test_steps_that_are_trained_anew_take_back_the_stages_that_they_led_to(open_stages):
    stages = open_stages()
    for step in range(4):
        long_step(stages, step, next_ordinal=10 * step)
    assert stages.index == 2
    assert open_stages(step=3, how=How.ANEW).index == 1
    resumed = open_stages(step=1, how=How.ANEW)
    assert (resumed.index, resumed.num_problems) == (0, 5)
    assert open_stages(step=1).index == 0  # also on the disk
    assert long_step(resumed, 1, next_ordinal=7) is True
    assert resumed.stage_of(7) == 1


def test_a_stage_that_begins_with_the_step_to_go_on_with_stays(open_stages):
    stages = open_stages()
    long_step(stages, 0)
    long_step(stages, 1)
    assert open_stages(step=2, how=How.ANEW).index == 1


def test_a_run_without_later_stages_is_one_stage_for_ever(open_stages):
    stages = open_stages(problems=(EASY,), stages=[])
    assert all(not long_step(stages, step) for step in range(30))
    assert stages.index == stages.stage_of(10**9) == 0


def test_nothing_left_to_learn_is_an_error_that_says_so(open_stages):
    stages = open_stages(problems=(EASY[:1], [], []))
    solved = group(0, EASY[0], num_tokens=60, rewards=(1.0, 1.0))
    stages.group_done(solved, Outcome.DROPPED)
    stages.step_trained(0, 10)
    stages.group_done(solved, Outcome.DROPPED)
    with pytest.raises(
        NoProblemsLeft, match=r"stage 1: all 1 problems .* drop_solved_above = 0\.9"
    ):
        stages.step_trained(1, 10)


def test_a_file_of_another_curriculum_is_an_error(open_stages):
    stages = open_stages()
    long_step(stages, 0)
    long_step(stages, 1)
    with pytest.raises(ValueError, match=r"stage 1 began at step 2, but the config has 0 later"):
        open_stages(step=2, problems=(EASY,), stages=[])
