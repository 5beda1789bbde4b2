"""Every rule of the config names key, value and what would be right."""

from pathlib import Path

import pytest

from megatron_magistral.config_file import ConfigError, dump, load, parse

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = CONFIGS / "tiny.yaml"


def test_a_run_directory_may_start_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load(TINY, ["run.directory=~/runs"]).run.directory == Path("/home/somebody/runs")


def test_a_dumped_config_loads_to_the_same_value(tmp_path):
    config = load(TINY, ["run.seed=5", "rl.algorithm.eps_high=0.3"])
    saved = tmp_path / "config.yaml"
    saved.write_text(dump(config))
    assert load(saved) == config


def test_an_override_replaces_one_value():
    assert load(TINY, ["rl.num_steps=7"]).rl.num_steps == 7


def test_a_section_can_be_removed():
    assert load(TINY, ["sft=null"]).sft is None


BAD = [
    ("rl.n_batchs=64", r"rl\.n_batchs = 64: unknown key; known here: .*n_batch"),
    ("nonsense=1", "nonsense = 1: unknown key; known here: .*model"),
    ("run.seed=-1", r"run\.seed = -1: .*greater than or equal to 0"),
    ("model.shape.num_heads=four", r"model\.shape\.num_heads = 'four': .*integer"),
    ("rl.n_batch=100", r"rl: n_batch = 100 must be a multiple of group_size"),
    ("rl.n_minibatch=48", r"rl: n_batch = \d+ must be a multiple of n_minibatch = 48"),
    ("rl.n_async=1", r"rl: n_async = 1 must be at least group_size"),
    ("rl.microbatch_tokens=16", r"rl\.microbatch_tokens = 16 must hold"),
    ("reward.l_cache=100000", r"reward: l_cache = 100000 must be less than l_max"),
    (
        "parallel.tensor=3",
        r"model\.shape\.num_heads = 4 must be a multiple of parallel\.tensor = 3",
    ),
    ("generator.tensor_parallel=4", r"num_kv_heads = 2 must be a multiple of generator"),
    ("parallel.pipeline=3", r"num_layers = 4 must be a multiple of parallel\.pipeline = 3"),
    ("parallel.virtual_pipeline=2", r"parallel: virtual_pipeline = 2 needs pipeline > 1"),
    (
        "parallel={tensor: 1, pipeline: 2, virtual_pipeline: 3}",
        r"num_layers = 4 must be a multiple of parallel\.pipeline = 2 x parallel\.virtual_pipe",
    ),
    ("parallel.expert=4", r"parallel: expert = 4 must divide tensor x data = 2"),
    ("parallel.expert=2", r"parallel\.expert = 2 must be 1: model\.shape has no experts"),
    ("parallel.data=5", r"rl\.n_minibatch = \d+ must be a multiple of parallel\.data = 5"),
    ("model.path=/nowhere", r"exactly one of model\.path and model\.shape"),
    ("data.train=x.jsonl", r"exactly one of data\.tiny_world and data\.train"),
    ("data.prompt_file=absent.txt", r"data\.prompt_file = .*absent\.txt: no such file"),
    ("rl.algorithm.tis_cap=2", r"tis_cap = 2.* needs recompute_old_logprobs"),
    (
        "rl.algorithm.entropy={control: act, eps_high_min: 0.3, eps_high_max: 0.4}",
        r"eps_high = 0\.28 must lie between entropy\.eps_high_min = 0\.3",
    ),
    ("rl.algorithm.entropy.eps_high_min=1", r"eps_high_min = 1.* must not exceed eps_high_max"),
    ("rl.algorithm.entropy.warmup_steps=0", r"warmup_steps = 0 must be at least 1 where target"),
    ("rl.optimizer.min_lr=1", r"min_lr = 1.* must not exceed lr"),
    ("rl.temperature=0", r"rl\.temperature = 0: .*greater than 0"),
    ("evaluation.every_steps=10", r"evaluation\.every_steps = 10 needs .*num_replicas >= 2"),
    ("evaluation.every_steps=7", r"= 7 must be a multiple of checkpoint\.rl_every_steps = 10"),
    ("checkpoint.keep_last=0", r"checkpoint\.keep_last = 0: .*greater than or equal to 1"),
    ("checkpoint.every=5", r"checkpoint\.every = 5: unknown key; known here: sft_every_steps"),
    ("rl.optimizer.max_nonfinite_steps=0", r"max_nonfinite_steps = 0: .*greater than"),
    ("rl.n_batch", r"an override is written section\.key=value"),
    ("rl.n_batch.x=1", r"n_batch is a value, not a section"),
    ("model.dtype=float64", r"model\.dtype = 'float64': .*'float32' or 'bfloat16'"),
]


@pytest.mark.parametrize(("override", "message"), BAD, ids=[override for override, _ in BAD])
def test_a_bad_value_is_an_error_that_names_it(override, message):
    with pytest.raises(ConfigError, match=message):
        load(TINY, [override])


def test_a_version_that_is_evaluated_beside_training_has_a_checkpoint():
    overrides = ["evaluation.every_steps=5", "checkpoint.rl_every_steps=0"]
    with pytest.raises(ConfigError, match=r"rl_every_steps = 0, which saves none before the end"):
        load(TINY, overrides)


def test_all_errors_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        load(TINY, ["run.seed=-1", "rl.nonsense=1", "reward.format=7"])
    assert len(str(caught.value).splitlines()) == 3


def test_both_stages_absent_is_an_error():
    with pytest.raises(ConfigError, match="at least one of the two stages"):
        load(TINY, ["sft=null", "rl=null"])


def test_a_missing_file_and_a_file_that_is_no_mapping_are_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="must be a mapping of sections, not list"):
        load(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(tmp_path / "broken.yaml")


def test_a_missing_section_is_named():
    with pytest.raises(ConfigError, match="reward: is missing"):
        parse({"model": {"path": "x"}, "data": {"train": "x"}})


def test_the_papers_asynchrony_bound_is_a_warning():
    config = load(TINY, ["rl.n_batch=64", "rl.n_minibatch=32", "rl.n_async=256"])
    text = "\n".join(config.warnings())
    assert "rl.n_async / rl.n_batch = 4.00" in text
    assert "rl.n_minibatch = 32 < rl.n_batch = 64" in text
    assert load(TINY).warnings() == []


def test_a_bound_on_staleness_that_holds_generators_back_is_a_warning():
    (warning,) = load(TINY, ["rl.max_staleness=1", "rl.n_async=256"]).warnings()
    assert warning.startswith("rl.max_staleness = 1: while a step trains, at most 1 x n_batch = ")
    assert load(TINY, ["rl.max_staleness=1"]).warnings() == []
