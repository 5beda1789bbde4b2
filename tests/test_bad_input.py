"""What a user can get wrong is one clear message and exit code 2, before anything is started."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from megatron_magistral import doctor
from megatron_magistral.cli import app
from megatron_magistral.data.schema import write_rows
from megatron_magistral.data.tokenizer import TinyModelShape, build_initial_model, build_tokenizer
from megatron_magistral.types import Trace
from tests.fakes import problem_of

ROOT = Path(__file__).parent.parent
TINY = ROOT / "configs" / "tiny.yaml"
SHAPE = TinyModelShape(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture
def refusal(tmp_path) -> Callable[..., list[str]]:
    """Calls `magistral train tiny.yaml ...`, checks what holds for every refusal, returns its
    lines."""

    def refuse(*overrides: str) -> list[str]:
        before = set(psutil.Process().children(recursive=True))
        runs = tmp_path / "runs"
        result = CliRunner().invoke(app, ["train", str(TINY), f"run.directory={runs}", *overrides])
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert not runs.exists()
        assert set(psutil.Process().children(recursive=True)) <= before
        return result.stderr.splitlines()

    return refuse


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["one two three four"], 300)


def model(folder: Path, tokenizer, shape: TinyModelShape = SHAPE, **changes: object) -> list[str]:
    """Overrides for a run with a model directory, whose config.json is then changed."""
    build_initial_model(folder, tokenizer, shape, seed=0)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return ["model.shape=null", f"model.path={folder}"]


def own_data(folder: Path, **texts: str) -> list[str]:
    """Overrides for a run with data files of its own, good ones but for `texts`."""
    overrides = ["data.tiny_world=null", "sft=null"]
    for name in ("train", "held_out"):
        path = folder / f"{name}.jsonl"
        write_rows(path, [problem_of(f"What is {name}?", id=name)])
        if name in texts:
            path.write_text(texts[name])
        overrides.append(f"data.{name}={path}")
    return overrides


def test_an_unknown_key_is_named_with_the_known_ones(refusal):
    (line,) = refusal("rl.n_batchs=64")
    assert line.startswith("rl.n_batchs = 64: unknown key; known here: ")
    assert "n_batch," in line


def test_a_missing_model_directory(refusal, tmp_path):
    (line,) = refusal("model.shape=null", f"model.path={tmp_path}/absent")
    assert line == f"model.path = {tmp_path}/absent: no Hugging Face model there (no config.json)"


@pytest.mark.parametrize("model_type", ["gpt2", "martian"], ids=["not-ours", "nobodys"])
def test_a_model_of_an_unknown_architecture(refusal, tmp_path, tokenizer, model_type):
    overrides = model(tmp_path / "model", tokenizer, model_type=model_type)
    (line,) = refusal(*overrides)
    assert line.startswith(f"model.path = {tmp_path}/model: ")
    assert model_type in line


def test_a_config_that_is_not_json(refusal, tmp_path, tokenizer):
    overrides = model(tmp_path / "model", tokenizer)
    (tmp_path / "model" / "config.json").write_text("{")
    (line,) = refusal(*overrides)
    assert line.startswith(f"model.path = {tmp_path}/model: ")


def test_a_tokenizer_with_more_ids_than_the_vocabulary(refusal, tmp_path, tokenizer):
    overrides = model(tmp_path / "model", tokenizer, vocab_size=290)
    lines = refusal(*overrides)
    assert any("its tokenizer has 300 ids but the model only 290" in line for line in lines)


def test_tensor_parallelism_that_does_not_divide_the_heads_of_a_model(refusal, tmp_path, tokenizer):
    shape = replace(SHAPE, hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    (line,) = refusal(*model(tmp_path / "model", tokenizer, shape))
    assert line.startswith("parallel: tp = 2 must divide the model's 3 attention heads")


def test_a_model_without_weights(refusal, tmp_path, tokenizer):
    overrides = model(tmp_path / "model", tokenizer)
    (tmp_path / "model" / "model.safetensors").unlink()
    (line,) = refusal(*overrides)
    assert "has neither model.safetensors nor" in line


def test_weights_that_do_not_fit_their_config(refusal, tmp_path, tokenizer):
    (line,) = refusal(*model(tmp_path / "model", tokenizer, num_hidden_layers=4))
    assert "missing: model.layers.2" in line


def test_a_prompt_file_without_the_problem(refusal, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Solve it.")
    (line,) = refusal(f"data.prompt_file={path}")
    assert line == f"data.prompt_file = {path}: must contain {{problem}} exactly once, found 0"


def test_a_prompt_file_that_is_not_text(refusal, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xff\xfe{problem}")
    assert refusal(f"data.prompt_file={path}") == [f"data.prompt_file = {path}: is not UTF-8 text"]


def test_a_missing_data_file(refusal, tmp_path):
    overrides = own_data(tmp_path)
    (tmp_path / "held_out.jsonl").unlink()
    (line,) = refusal(*overrides)
    assert line == f"data.held_out = {tmp_path}/held_out.jsonl: no such file"


def test_a_held_out_problem_that_is_trained_on(refusal, tmp_path):
    overrides = own_data(tmp_path)
    (line,) = refusal(*overrides, f"data.held_out={tmp_path}/train.jsonl")
    assert line.startswith(f"data.held_out = {tmp_path}/train.jsonl: 1 of its problems are in ")


def test_prompts_of_which_none_leaves_room_for_a_completion(refusal, tmp_path, tokenizer):
    shape = replace(SHAPE, max_position_embeddings=170)
    overrides = [*model(tmp_path / "model", tokenizer, shape), *own_data(tmp_path)]
    lines = refusal(*overrides, "reward.l_max=160")
    assert [line.split(" = ")[0] for line in lines] == ["data.train", "data.held_out"]
    assert "reward.l_max = 160 leaves 10 of the model's 170 positions" in lines[0]


def test_traces_of_which_none_fits_into_a_microbatch(refusal, tmp_path, tokenizer):
    traces = tmp_path / "traces.jsonl"
    write_rows(traces, [Trace("train", "a statement", "a response")])
    data = [override for override in own_data(tmp_path) if override != "sft=null"]
    overrides = [*model(tmp_path / "model", tokenizer), *data, f"data.traces={traces}"]
    (line,) = refusal(*overrides, "rl=null", "sft.microbatch_tokens=5")
    assert line.startswith(f"data.traces = {traces}: the shortest has ")
    assert line.endswith("sft.microbatch_tokens = 5 allow 5")


def test_a_data_file_with_bad_rows_alone_names_the_first(refusal, tmp_path):
    (line,) = refusal(*own_data(tmp_path, train='{"id": "a"}\nnonsense\n'))
    assert line.startswith(
        f"data.train = {tmp_path}/train.jsonl: holds no usable row (0 rows read, 2 set aside), "
        f"the first: {tmp_path}/train.jsonl:1: "
    )


def test_an_empty_data_file(refusal, tmp_path):
    (line,) = refusal(*own_data(tmp_path, held_out=""))
    assert line == (
        f"data.held_out = {tmp_path}/held_out.jsonl: holds no usable row (0 rows read, 0 set aside)"
    )


def test_some_bad_rows_are_a_warning(tmp_path):
    good = (tmp_path / "good.jsonl", problem_of(id="good"))
    write_rows(good[0], [good[1]])
    overrides = own_data(tmp_path, train=good[0].read_text() + "nonsense\n")
    result = CliRunner().invoke(app, ["train", str(TINY), "--dry-run", *overrides])
    assert result.exit_code == 0
    assert f"warning: data.train = {tmp_path}/train.jsonl: 1 rows read, 1 set" in result.stderr


def test_a_port_that_is_taken(refusal):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (line,) = refusal(f"generator.port={port}")
    assert line.startswith(f"port {port}: taken; ")


def test_ports_that_do_not_exist(refusal):
    (line,) = refusal("generator.port=65535", "generator.num_replicas=2")
    assert line == (
        "generator.port = 65535: the last of 2 ports would be 65536; at most 65535 is possible"
    )


def test_no_compiler(refusal, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = refusal()
    assert line == "g++: not found; install g++ (Debian: apt install g++)"


def test_not_enough_memory(refusal, monkeypatch):
    monkeypatch.setattr(doctor, "MEMORY_NEEDED_MIB", 1 << 40)
    (line,) = refusal()
    assert line.startswith("free memory: ") and line.endswith(f"free at least {1 << 40} MiB")


def test_a_run_directory_that_is_a_file(tmp_path):
    (tmp_path / "runs").write_text("")
    result = CliRunner().invoke(app, ["train", str(TINY), f"run.directory={tmp_path}/runs"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"run.directory = {tmp_path}/runs: no folder can be made there")


def test_a_run_directory_whose_path_is_too_long_for_a_socket(refusal):
    (line,) = refusal(f"run.name={'x' * 120}")
    assert "at most 107 are possible, so choose a shorter run.directory or run.name" in line


def test_everything_that_is_wrong_is_said_at_once(refusal, tmp_path, tokenizer):
    (tmp_path / "prompt.txt").write_text("Solve it.")
    lines = refusal(
        *own_data(tmp_path, train="", held_out=""),
        *model(tmp_path / "model", tokenizer, model_type="gpt2"),
        f"data.prompt_file={tmp_path}/prompt.txt",
    )
    assert [line.split(" = ")[0] for line in lines] == [
        "data.train",
        "data.held_out",
        "data.prompt_file",
        "model.path",
    ]


def test_a_real_process_says_it_on_standard_error_without_a_traceback(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "megatron_magistral.cli", "train", str(TINY), "run.nam=x"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("run.nam = 'x': unknown key; known here: name, directory")
    assert len(result.stderr.splitlines()) == 1
