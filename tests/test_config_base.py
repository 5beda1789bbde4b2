"""A config that builds on another states only what is different."""

import pytest

from megatron_magistral.config_file import ConfigError, dump, load, read


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def test_sections_are_merged_key_by_key_and_lists_are_replaced(tmp_path):
    path = write(
        tmp_path,
        top="base: below.yaml\nrl: {n_async: 4, stages: [1]}\nreward: {l_max: 9}\n",
        below="rl: {n_async: 2, n_batch: 8, stages: [2, 3]}\nrun: {seed: 1}\n",
    )
    assert read(path) == {
        "rl": {"n_async": 4, "n_batch": 8, "stages": [1]},
        "run": {"seed": 1},
        "reward": {"l_max": 9},
    }


def test_null_removes_a_section(tmp_path):
    path = write(tmp_path, top="base: below.yaml\nsft: null\n", below="sft: {num_steps: 3}\n")
    assert read(path) == {"sft": None}


def test_a_base_may_have_a_base(tmp_path):
    path = write(
        tmp_path, a="base: b.yaml\nx: 1\n", b="base: c.yaml\nx: 2\ny: 2\n", c="x: 3\ny: 3\nz: 3\n"
    )
    assert read(path) == {"x": 1, "y": 2, "z": 3}


def test_each_file_names_paths_relative_to_itself(tmp_path):
    below = tmp_path / "below"
    write(below, base="data: {train: t.jsonl, held_out: h.jsonl}\nmodel: {path: ../model}\n")
    path = write(tmp_path / "above", top="base: ../below/base.yaml\ndata: {train: mine.jsonl}\n")
    assert read(path) == {
        "data": {
            "train": str(tmp_path / "above" / "mine.jsonl"),
            "held_out": str(below / "h.jsonl"),
        },
        "model": {"path": str(tmp_path / "model")},
    }


def test_paths_of_later_stages_are_relative_to_their_file_too(tmp_path):
    path = write(tmp_path, top="rl: {stages: [{add_problems: hard.jsonl}]}\n")
    assert read(path)["rl"]["stages"] == [{"add_problems": str(tmp_path / "hard.jsonl")}]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "base: a.yaml\n"}, r"a\.yaml: base: files that build on each other: .*a\.yaml -> "),
        (
            {"a": "base: b.yaml\n", "b": "base: c.yaml\n", "c": "base: b.yaml\n"},
            r"c\.yaml: base: files that build .*a\.yaml -> .*b\.yaml -> .*c\.yaml -> .*b\.yaml",
        ),
        ({"a": "base: absent.yaml\n"}, r"a\.yaml: base: .*absent\.yaml: cannot be read: No such"),
        ({"a": "base: [b.yaml]\n"}, r"a\.yaml: base = \['b\.yaml'\]: must be the path of one"),
        ({"a": "base:\n"}, r"a\.yaml: base = None: must be the path of one"),
        ({"a": "base: b.yaml\n", "b": "- 1\n"}, r"a\.yaml: base: .*b\.yaml: must be a mapping"),
        ({"a": "base: b.yaml\n", "b": "x: [\n"}, r"a\.yaml: base: .*b\.yaml: is not YAML"),
    ],
    ids=["itself", "cycle", "absent", "list", "empty", "no mapping", "no yaml"],
)
def test_a_base_that_cannot_be_is_an_error_that_names_the_files(tmp_path, files, message):
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path, **files))


def test_batches_may_not_shrink_where_staleness_is_bounded(tmp_path):
    """What is under way then was admitted on the promise of larger batches."""
    path = write(tmp_path, top="base: below.yaml\n", below=BELOW)
    stage = "rl.stages=[{begin: {max_steps: 1}, n_batch: 2, n_minibatch: 2}]"
    sizes = ["rl.n_batch=4", "rl.n_minibatch=4", "rl.n_async=4"]
    load(path, [*sizes, stage])
    with pytest.raises(ConfigError, match=r"stages\.0: n_batch = 2 is less than the 4 .*staleness"):
        load(path, [*sizes, stage, "rl.max_staleness=3"])


def test_an_unknown_key_in_a_derived_file_is_an_error(tmp_path):
    path = write(tmp_path, top="base: below.yaml\nrl: {n_batchs: 4}\n", below=BELOW)
    with pytest.raises(ConfigError, match=r"rl\.n_batchs = 4: unknown key"):
        load(path)


def test_a_run_folder_keeps_the_whole_config_and_no_base(tmp_path):
    path = write(tmp_path, top="base: below.yaml\nrun: {seed: 4}\n", below=BELOW)
    config = load(path)
    assert config.run.seed == 4
    saved = tmp_path / "elsewhere.yaml"
    saved.write_text(dump(config))
    path.unlink()
    assert load(saved) == config


BELOW = """
model: {shape: {}}
data: {tiny_world: {}}
reward: {l_max: 64, l_cache: 8}
rl: {num_steps: 1, group_size: 2, n_batch: 2, n_minibatch: 2, n_async: 2, microbatch_tokens: 128,
     optimizer: {lr: 1.0}}
"""


# --- later stages -----------------------------------------------------------------------------


def staged(tmp_path, *stages):
    path = write(tmp_path, top="base: below.yaml\n", below=BELOW)
    return load(path, [f"rl.stages=[{', '.join(stages)}]"])


def test_a_stage_replaces_what_it_names_and_keeps_the_rest(tmp_path):
    config = staged(
        tmp_path,
        "{begin: {max_steps: 5}, n_async: 8, n_batch: 4, n_minibatch: 4}",
        "{begin: {max_steps: 5}, l_max: 100, l_cache: 20}",
    )
    assert config.num_rl_stages == 3
    assert config.at_stage(0) == config.model_copy(
        update={"rl": config.rl.model_copy(update={"stages": ()})}
    )
    values = [
        (c.rl.n_async, c.rl.n_batch, c.rl.n_minibatch, c.reward.l_max, c.reward.l_cache)
        for c in map(config.at_stage, range(3))
    ]
    assert values == [(2, 2, 2, 64, 8), (8, 4, 4, 64, 8), (8, 4, 4, 100, 20)]
    assert config.longest_completion == 100


BAD_STAGES = [
    ("{begin: {}}", r"rl\.stages\.0\.begin: give at least one of max_steps"),
    ("{begin: {max_steps: 2, min_steps: 3}}", r"max_steps = 2 must be at least min_steps = 3"),
    ("{begin: {max_steps: 1}, l_mx: 3}", r"rl\.stages\.0\.l_mx = 3: unknown key; known here: beg"),
    ("{begin: {max_stps: 1}}", r"rl\.stages\.0\.begin\.max_stps = 1: unknown key; .*max_steps"),
    ("{l_max: 90}", r"rl\.stages\.0\.begin: is missing"),
    ("{begin: {max_steps: 1}, l_max: 4}", r"rl\.stages\.0: l_cache = 8 must be less than l_max"),
    ("{begin: {max_steps: 1}, l_max: 128}", r"rl\.stages\.0: .*microbatch_tokens = 128 must hold"),
    ("{begin: {max_steps: 1}, n_batch: 3}", r"rl\.stages\.0: n_batch = 3 must be a multiple"),
    ("{begin: {max_steps: 1}, n_batch: 4}", r"rl\.stages\.0: n_batch / n_minibatch = 2, .* is 1"),
    ("{begin: {max_steps: 1}, add_problems: x}", r"rl\.stages\.0\.add_problems = .*x: no such"),
    ("{begin: {max_steps: 1}, drop_solved_above: 1}", r"drop_solved_above = 1: .*less than 1"),
]


@pytest.mark.parametrize(("stage", "message"), BAD_STAGES, ids=[stage for stage, _ in BAD_STAGES])
def test_a_stage_that_cannot_be_is_an_error_that_names_it(tmp_path, stage, message):
    with pytest.raises(ConfigError, match=message):
        staged(tmp_path, stage)
