"""Every file in configs/ is a run that would start, were its model and data there."""

import re
from pathlib import Path

import pytest

from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError, load, parse, read

CONFIGS = Path(__file__).parent.parent / "configs"
SHIPPED = sorted(CONFIGS.rglob("*.yaml"))
ABLATIONS = sorted((CONFIGS / "ablations").glob("*.yaml"))
OWN = {"tiny", "smollm2"}  # runs of this project; the others are the paper's
FILE_KEYS = {"train", "held_out", "traces", "prompt_file", "add_problems"}

by_name = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)


def with_files(node, folder: Path):
    """The same config with files that exist."""
    if isinstance(node, list):
        return [with_files(item, folder) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: str(folder / "problems.jsonl")
        if key in FILE_KEYS and value is not None
        else str(folder)
        if key == "path" and value is not None
        else with_files(value, folder)
        for key, value in node.items()
    }


@pytest.fixture
def shipped(tmp_path):
    """Loads a shipped config as if its model and data were there."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "problems.jsonl").touch()

    def load_one(name: str) -> Config:
        return parse(with_files(read(CONFIGS / f"{name}.yaml"), tmp_path))

    return load_one


@by_name
def test_every_shipped_config_is_valid(path, shipped):
    config = shipped(path.relative_to(CONFIGS).with_suffix(""))
    assert config.run.name == path.stem


@pytest.mark.parametrize("path", [p for p in SHIPPED if p.stem not in OWN], ids=lambda p: p.stem)
def test_every_run_of_the_paper_says_where_it_is_there(path):
    comment = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert re.search(r"[Ss]ections?[ #]+\d", comment)


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_is_ten_lines_and_differs_from_what_it_builds_on(path, shipped):
    lines = path.read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) <= 10
    (base,) = [line.removeprefix("base: ") for line in lines if line.startswith("base: ")]
    above = read(path)
    below = read(path.parent / base)
    assert above.pop("run") != below.pop("run")
    assert above != below


def test_what_a_user_has_to_bring_is_named_line_by_line():
    with pytest.raises(ConfigError) as caught:
        load(CONFIGS / "medium.yaml")
    lines = str(caught.value).splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "model.path",
        "data.train",
        "data.held_out",
        "rl.stages.0.add_problems",
        "rl.stages.1.add_problems",
    ]
    assert all("no Hugging Face model there" in line or "no such file" in line for line in lines)


def test_medium_has_the_papers_three_stages(shipped):
    config = shipped("medium")
    stages = [config.at_stage(index) for index in range(config.num_rl_stages)]
    k = 1024
    assert [stage.reward.l_max - stage.reward.l_cache for stage in stages] == [
        16 * k,
        24 * k,
        32 * k,
    ]
    for key in ("n_batch", "n_minibatch", "n_async"):
        assert [getattr(stage.rl, key) for stage in stages] == [8 * k, 4 * k, 2 * k]
    entropy = config.rl.algorithm.entropy
    assert (entropy.eps_high_min, entropy.eps_high_max) == (0.26, 0.28)
    assert config.rl.algorithm.eps_low == 0.2
    assert config.rl.group_size == 16
    assert config.warnings() == []


def test_small_has_the_papers_sizes(shipped):
    sft, rl = shipped("small_sft"), shipped("small_rl")
    assert sft.sft.num_epochs == 4
    assert sft.rl is None
    assert (rl.rl.n_batch, rl.rl.n_minibatch) == (2048, 2048)
    assert rl.reward.l_max - rl.reward.l_cache == 32 * 1024
    assert (rl.rl.temperature, rl.rl.algorithm.eps_high) == (1.0, 0.3)
    assert rl.warnings() == []


def test_batch_ablations_have_the_sizes_of_figure_6(shipped):
    sizes = {
        (rl.n_async, rl.n_batch, rl.n_minibatch)
        for path in ABLATIONS
        if path.stem.startswith(("batch", "minibatch"))
        for rl in [shipped(f"ablations/{path.stem}").rl]
    }
    equal = {(4096, n, n) for n in (1024, 2048, 4096, 8192)}
    assert sizes == equal | {(4096, 8192, n) for n in (1024, 2048, 4096)}
