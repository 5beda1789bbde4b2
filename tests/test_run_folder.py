import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_magistral.config_file import load
from megatron_magistral.run_folder import RunBusy, RunFolder, Stage

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


def test_one_process_of_a_role_writes_to_a_run_at_a_time(tmp_path):
    run = RunFolder(tmp_path)
    with (
        run.lock("trainer"),
        run.lock("controller"),
        pytest.raises(RunBusy, match=r"trainer\.lock: is held by another process after 0 s"),
        run.lock("trainer", timeout_s=0.0),
    ):
        pass
    with run.lock("trainer", timeout_s=0.0):
        pass


def test_a_lock_is_waited_for(tmp_path):
    run = RunFolder(tmp_path)
    held = threading.Event()

    def hold() -> None:
        with run.lock("trainer"):
            held.set()
            time.sleep(0.3)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(10)
    with run.lock("trainer"):
        assert not other.is_alive() or other.join(10) is None


def test_a_finished_stage_stays_finished(tmp_path):
    run = RunFolder(tmp_path)
    assert not run.is_finished(Stage.SFT)
    run.mark_finished(Stage.SFT)
    assert run.is_finished(Stage.SFT)
    assert not run.is_finished(Stage.RL)


def test_a_config_that_changes_keeps_what_it_was(tmp_path):
    run = RunFolder(tmp_path)
    run.config.write_text("a")
    for text in ("a", "b", "b", "c"):
        run.replace_config(text)
    assert run.config.read_text() == "c"
    former = sorted(path.name for path in tmp_path.glob("config.*.yaml"))
    assert former == ["config.1.yaml", "config.2.yaml"]
    assert [(tmp_path / name).read_text() for name in former] == ["a", "b"]


@pytest.mark.parametrize("broken", ["write_text", "rename", "replace"])
def test_a_run_whose_config_cannot_be_replaced_still_has_one(tmp_path, monkeypatch, broken):
    def fail(*arguments, **named):
        raise OSError("no space left")

    run = RunFolder(tmp_path)
    run.config.write_text("a")
    monkeypatch.setattr(Path, broken, fail)
    with suppress(OSError):
        run.replace_config("b")
    assert run.config.read_text() in {"a", "b"}
