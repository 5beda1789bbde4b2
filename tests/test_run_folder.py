from pathlib import Path

import pytest

from megatron_magistral.config_file import load
from megatron_magistral.run_folder import RunFolder

TINY = Path(__file__).parent.parent / "configs" / "tiny.yaml"


def test_runs_that_start_in_one_second_get_folders_of_their_own(tmp_path):
    config = load(TINY, [f"run.directory={tmp_path}", "run.name=twin"])
    first, second = RunFolder.create(config), RunFolder.create(config)
    assert first.root != second.root
    for run in (first, second):
        assert run.root.name.startswith("twin-")
        assert run.log("trainer-0").parent.is_dir()


def test_a_run_folder_is_absolute_wherever_a_role_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(load(TINY, ["run.directory=here"]))
    assert run.root.is_absolute()
    assert run.root.parent == tmp_path / "here"


@pytest.mark.parametrize(
    ("overrides", "first", "rl"),
    [
        ([], "models/initial", "models/sft"),
        (["sft=null"], "models/initial", "models/initial"),
        (["model.shape=null", "model.path={model}"], "{model}", "models/sft"),
        (["model.shape=null", "model.path={model}", "sft=null"], "{model}", "{model}"),
    ],
    ids=["shape-sft-rl", "shape-rl", "model-sft-rl", "model-rl"],
)
def test_each_stage_starts_from_what_the_one_before_made(tmp_path, overrides, first, rl):
    model = tmp_path / "given"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = load(TINY, [override.format(model=model) for override in overrides])
    run = RunFolder(tmp_path / "run")
    expected = [run.root / path.format(model=model) for path in (first, rl)]
    assert [run.first_model(config), run.rl_model(config)] == expected
