"""Distributions of lengths: given by name, or taken from what a run wrote."""

from __future__ import annotations

import json
import random
from statistics import fmean

import pytest

from megatron_magistral.analysis.lengths import LengthsError, lengths_of_run, parse_lengths
from megatron_magistral.run_folder import RunFolder


@pytest.mark.parametrize("text", ["constant:100", "lognormal:100,0.5", "pareto:100,3"])
def test_the_mean_before_the_cap_is_the_one_that_is_asked_for(text):
    rng = random.Random(0)
    lengths = parse_lengths(text, cap=1e9)
    assert fmean(lengths.sample(rng) for _ in range(50_000)) == pytest.approx(100, rel=0.03)


@pytest.mark.parametrize("text", ["constant:100", "lognormal:100,2", "pareto:100,1.1"])
def test_no_completion_is_longer_than_the_cap(text):
    assert max(parse_lengths(text, cap=90).draws(1000)) <= 90


@pytest.mark.parametrize(
    "text",
    [
        *("normal:1,2", "lognormal:100", "pareto:100,1", "constant:-1", "constant:x", ""),
        *("constant:nan", "constant:inf", "lognormal:4000,1000", "lognormal:1e300,1"),
    ],
)
def test_what_is_no_distribution_is_an_error_with_an_example(text):
    with pytest.raises(LengthsError, match="lognormal:4000,1"):
        parse_lengths(text, cap=10)


def test_lengths_of_a_run_have_the_shape_of_its_samples_and_the_mean_of_its_metrics(tmp_path):
    run = RunFolder(tmp_path)
    rows = [{"step": 0, "spans": [[0, 0, 4], [1, 4, length]]} for length in (10, 20, 30)]
    run.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [{"stage": "sft", "step": 0}, {"stage": "rl", "completion_tokens_mean": 40.0}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in metrics))

    lengths = lengths_of_run(run, cap=50)

    assert set(lengths.draws(100)) == {20.0, 40.0, 50.0}


def test_a_run_that_goes_on_may_be_in_the_middle_of_a_line(tmp_path):
    run = RunFolder(tmp_path)
    run.samples.write_text('{"spans": [[0, 0, 8]]}\n{"spa')
    run.metrics.write_text('{"completion_tokens_mean": 4.0}\n{"comp')
    assert set(lengths_of_run(run, cap=50).draws(10)) == {4.0}


def test_a_damaged_file_of_a_run_is_named(tmp_path):
    run = RunFolder(tmp_path)
    run.samples.write_text('{"spans": [[0, 0, 8]]}\n')
    run.metrics.write_text("\0\0\n{}\n")
    with pytest.raises(LengthsError, match=r"metrics\.jsonl: line 1 is no JSON"):
        lengths_of_run(run, cap=50)


def test_completions_without_a_token_are_no_distribution(tmp_path):
    run = RunFolder(tmp_path)
    run.samples.write_text('{"spans": []}\n')
    run.metrics.write_text('{"completion_tokens_mean": 0.0}\n')
    with pytest.raises(LengthsError, match="to take lengths from"):
        lengths_of_run(run, cap=50)


def test_a_run_that_trained_no_step_has_no_lengths(tmp_path):
    with pytest.raises(LengthsError, match=r"samples\.jsonl"):
        lengths_of_run(RunFolder(tmp_path), cap=50)
