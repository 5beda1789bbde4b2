"""What must be the same when a stage goes on, and what may differ."""

import pytest

from megatron_magistral.config_file import load
from megatron_magistral.trainer.fingerprint import differences, training_values
from tests.cli_runs import ROOT

TINY = ROOT / "configs" / "tiny.yaml"


def changed(stage: str, *overrides: str) -> list[str]:
    before, after = load(TINY), load(TINY, overrides)
    return differences(training_values(before, stage), training_values(after, stage))


@pytest.mark.parametrize(
    ("stage", "override", "line"),
    [
        ("rl", "rl.optimizer.lr=1.0e-5", "rl.optimizer.lr = 1e-05, was 0.0002"),
        ("rl", "rl.algorithm.eps_high=0.3", "rl.algorithm.eps_high = 0.3, was 0.28"),
        ("rl", "reward.l_max=100", "reward.l_max = 100, was 160"),
        ("rl", "run.seed=5", "run.seed = 5, was 0"),
        ("sft", "sft.batch_size=64", "sft.batch_size = 64, was 32"),
        ("sft", "model.dtype=bfloat16", "model.dtype = 'bfloat16', was 'float32'"),
    ],
)
def test_what_determines_the_training_must_be_the_same(stage, override, line):
    assert changed(stage, override) == [line]


@pytest.mark.parametrize(
    ("stage", "override"),
    [
        ("rl", "parallel.tensor=1"),
        ("rl", "parallel.pipeline=2"),
        ("rl", "rl.num_steps=100"),
        ("rl", "checkpoint.keep_last=5"),
        ("rl", "generator.num_replicas=2"),
        ("rl", "sft.batch_size=64"),
        ("sft", "rl.optimizer.lr=1.0e-5"),
        ("sft", "reward.l_max=100"),
        ("sft", "sft.microbatch_tokens=4096"),
    ],
)
def test_layout_length_and_the_other_stage_may_differ(stage, override):
    assert changed(stage, override) == []


BATCHES = ["rl.stages.0.n_batch = 32, was 64", "rl.stages.0.n_minibatch = 32, was 64"]
STAGE = "{begin: {max_steps: 9}, n_batch: 64, n_minibatch: 64, n_async: 64}"


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("n_batch: 64, n_minibatch: 64", "n_batch: 32, n_minibatch: 32", BATCHES),
        ("max_steps: 9", "max_steps: 8", ["rl.stages.0.begin.max_steps = 8, was 9"]),
        ("n_async: 64", "n_async: 96, kv_budget_tokens: 9000", []),
    ],
)
def test_a_later_stage_differs_by_the_keys_that_do(before, after, lines):
    old, new = (load(TINY, [f"rl.stages=[{s}]"]) for s in (STAGE, STAGE.replace(before, after)))
    assert differences(*(training_values(config, "rl") for config in (old, new))) == lines


def test_a_section_that_one_of_them_lacks_is_a_difference():
    files = (f"data.train={TINY}", f"data.held_out={TINY}")
    lines = changed("rl", "sft=null", "data.tiny_world=null", *files)
    assert f"data.train = '{TINY}', was None" in lines
    assert "data.tiny_world.num_train = None, was 2048" in lines
