"""Which completions of an RL run become supervised traces, and the file that they become."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_magistral.cli import app
from megatron_magistral.config_file import load
from megatron_magistral.data.schema import read_traces
from megatron_magistral.data.traces import (
    Instruction,
    Sample,
    SelectionSettings,
    mix,
    select_traces,
)

TINY = Path(__file__).parent.parent.parent / "configs" / "tiny.yaml"


def sample(problem, response, *, step=10, solved=True, tokens=20):
    return Sample(step, problem, f"statement of {problem}", response, solved, ((3, 0, tokens),))


def select(samples, rates=None, **settings):
    return select_traces(samples, rates or {}, SelectionSettings(**settings))


def responses(selection):
    return [trace.response for trace in selection.traces]


def test_only_correct_completions_are_imitated():
    selection = select([sample("a", "right"), sample("a", "wrong", solved=False)], hard_below=0)
    assert responses(selection) == ["right"]
    assert selection.counts["not solved"] == 1


def test_early_steps_and_short_completions_are_left_out():
    samples = [
        sample("a", "early", step=4),
        sample("a", "at the limits", step=5, tokens=7),
        sample("a", "short", tokens=6),
    ]
    selection = select(samples, from_step=5, min_tokens=7, hard_below=0)
    assert responses(selection) == ["at the limits"]
    assert selection.counts["of an early step"] == selection.counts["short"] == 1


def test_the_same_response_to_a_problem_comes_once():
    samples = [sample("a", "same"), sample("a", "same"), sample("b", "same")]
    selection = select(samples, hard_below=0)
    assert [trace.problem_id for trace in selection.traces] == ["a", "b"]
    assert selection.counts["repeated"] == 1


def test_a_problem_has_no_more_traces_than_its_cap():
    samples = [sample("a", f"a{i}") for i in range(50)] + [sample("b", "b0")]
    selection = select(samples, max_per_problem=3, hard_below=0)
    assert [trace.problem_id for trace in selection.traces] == ["a", "a", "a", "b"]
    assert len(set(responses(selection))) == 4
    assert selection.counts["beyond the cap of their problem"] == 47


def test_what_the_cap_leaves_is_chosen_by_the_seed():
    samples = [sample("a", f"a{i}") for i in range(50)]
    chosen = {tuple(responses(select(samples, seed=seed, max_per_problem=3))) for seed in range(9)}
    assert len(chosen) == 9
    assert select(samples, seed=4) == select(samples, seed=4)


def test_of_the_different_responses_each_is_as_likely_to_be_chosen():
    samples = [sample("a", f"a{i}") for i in range(4)] + [sample("a", "a0")] * 50
    picks = Counter(
        responses(select(samples, seed=seed, max_per_problem=1, hard_below=0))[0]
        for seed in range(400)
    )
    assert set(picks) == {"a0", "a1", "a2", "a3"}
    assert max(picks.values()) < 140  # 100 on average, standard deviation 9


def test_samples_need_not_fit_into_memory():
    def stream():
        for number in range(300):
            yield sample("a", f"{number:03}" + "." * 100_000)

    tracemalloc.start()
    select(stream(), max_per_problem=2)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 30 * 100_000  # 30 MB in all


def test_traces_of_problems_that_are_seldom_solved_come_more_often():
    samples = [sample("hard", "h"), sample("easy", "e")]
    selection = select(samples, {"hard": 0.1, "easy": 0.25}, hard_below=0.25, copies_of_hard=3)
    assert responses(selection) == ["h", "h", "h", "e"]
    assert selection.counts["copies of hard problems"] == 2


def test_without_pass_rates_of_the_run_the_samples_tell_them():
    samples = [sample("a", "x"), *[sample("a", "no", solved=False)] * 4, sample("b", "y")]
    assert responses(select(samples, hard_below=0.25)) == ["x", "x", "y"]


def test_every_sample_has_one_fate():
    samples = [
        sample(f"p{i % 7}", f"r{i % 40}", step=i % 12, solved=i % 3 > 0, tokens=i % 30)
        for i in range(500)
    ]
    counts = select(samples, from_step=3, min_tokens=5, max_per_problem=2).counts
    copies = counts.pop("copies of hard problems")
    assert counts.pop("samples") == sum(counts.values()) == 500
    assert copies >= 0


def test_general_instructions_are_their_share_of_the_whole():
    traces = select([sample(f"p{i}", "r") for i in range(90)], hard_below=0).traces
    instructions = [Instruction(f"prompt {i}", "yes") for i in range(40)]
    rows = mix(traces, instructions, 0.1, seed=0)
    general = [row for row in rows if row.prompt]
    assert (len(general), len(rows)) == (10, 100)
    assert len({row.prompt for row in general}) == 10
    assert rows[:90] != traces  # shuffled


def test_too_few_general_instructions_are_an_error():
    traces = select([sample(f"p{i}", "r") for i in range(90)]).traces
    with pytest.raises(ValueError, match=r"general_share = 0\.1: 90 traces need 10 .* there are 1"):
        mix(traces, [Instruction("p", "r")], 0.1, seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_per_problem": 0}, "max_per_problem = 0: must be at least 1"),
        ({"hard_below": 1.5}, r"hard_below = 1\.5: must be in \[0, 1\]"),
        ({"copies_of_hard": 0}, "copies_of_hard = 0: must be at least 1"),
        ({"from_step": -1}, "from_step = -1: must be at least 0"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        SelectionSettings(**settings)


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path):
    rows = [
        {
            "step": step,
            "problem": f"p{step % 5}",
            "category": "arithmetic",
            "language": "en",
            "statement": f"statement {step % 5}",
            "response": f"<think>{step}</think>right",
            "reward": 1.1,
            "solved": step % 2 == 0,
            "detail": "",
            "spans": [[1, 0, 5], [2, 5, 12]],
        }
        for step in range(40)
    ]
    lines = [json.dumps(row) for row in rows]
    lines[7] = '{"step": "seven"}'
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, ["data", "traces", *map(str, arguments)])


def test_what_is_written_is_the_traces_of_an_sft_config(run_folder, tmp_path):
    general = tmp_path / "general.jsonl"
    general.write_text('{"prompt": "Hello", "response": "Hi"}\n{"prompt": "", "response": "x"}\n')
    out = tmp_path / "traces.jsonl"
    result = call(run_folder, "--out", out, "--general", general, "--general-share", 0.05)
    assert result.exit_code == 0, result.output
    assert f"set aside {run_folder}/samples.jsonl:8: " in result.output
    assert f"set aside {general}:2: prompt is empty" in result.output
    read = read_traces(out)
    assert read.bad == ()
    # 20 were solved; the first tenth of the steps, 2 of them, is early. One is general.
    assert len(read.rows) == 19
    assert [row.prompt for row in read.rows if row.prompt] == ["Hello"]
    problems = tmp_path / "problems.jsonl"
    problems.touch()
    overrides = [f"data.{key}={problems}" for key in ("train", "held_out")]
    config = load(TINY, ["data.tiny_world=null", "rl=null", f"data.traces={out}", *overrides])
    assert config.data.traces == out


def test_pass_rates_that_the_run_kept_decide_what_is_hard(run_folder, tmp_path):
    rows = [f'{{"ordinal":{i},"problem":"p{i}","num_graded":8,"num_solved":{i}}}' for i in range(5)]
    (run_folder / "pass_rates.jsonl").write_text("\n".join(rows) + "\n")
    out = tmp_path / "traces.jsonl"
    result = call(run_folder, "--out", out, "--copies-of-hard", 5)
    assert result.exit_code == 0, result.output
    counts = {}
    for row in read_traces(out).rows:
        counts[row.problem_id] = counts.get(row.problem_id, 0) + 1
    assert counts == {"p0": 15, "p1": 20, "p2": 3, "p3": 4, "p4": 4}  # p0 and p1 are hard


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-per-problem", 0], "--max-per-problem = 0: must be at least 1"),
        (["--min-tokens", 1000], "none of its completions is left"),
        (["--general", "/nowhere.jsonl"], "/nowhere.jsonl: cannot be read: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_message(run_folder, tmp_path, arguments, message):
    out = tmp_path / "traces.jsonl"
    result = call(run_folder, "--out", out, *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not out.exists()


def test_a_folder_without_samples_is_an_error(tmp_path):
    result = call(tmp_path, "--out", tmp_path / "x.jsonl")
    assert result.exit_code == 2
    assert "samples.jsonl: cannot be read: No such file" in result.output
