"""Model directories: reading, the errors of damaged ones, and writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_magistral.weights.architecture import architecture_of
from megatron_magistral.weights.hf_dir import (
    HFWeights,
    WeightsError,
    open_weights,
    write_hf_dir,
)
from megatron_magistral.weights.names import hf_shapes
from tests.trainer.models import hf_model, save


def shapes_of(tensors: list[tuple[str, Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}


@pytest.mark.parametrize("max_shard_size", ["50GB", "60KB"])
def test_one_file_or_many_read_the_same(tmp_path: Path, max_shard_size: str) -> None:
    model = hf_model("llama")
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    weights = HFWeights(tmp_path)
    weights.check(hf_shapes(architecture_of(model.config)))
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


def test_one_error_names_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    model = hf_model("llama")
    save(model, tmp_path)
    expected = hf_shapes(architecture_of(model.config))
    expected["model.norm.weight"] = (65,)
    expected["model.layers.9.mlp.up_proj.weight"] = (1, 2)
    del expected["lm_head.weight"]
    with pytest.raises(WeightsError) as error:
        HFWeights(tmp_path).check(expected)
    assert str(error.value) == (
        f"{tmp_path}: tensors missing: model.layers.9.mlp.up_proj.weight; "
        "not in this architecture: lm_head.weight; "
        "wrong shape: model.norm.weight [64], must be [65]"
    )


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors nor"):
        HFWeights(tmp_path)
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(WeightsError, match=f"names files that are absent: {lost.name}"):
        HFWeights(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save(hf_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(WeightsError, match=f"{path}: cannot be read as safetensors"):
        HFWeights(tmp_path)


def test_a_long_list_of_tensors_is_cut_short(tmp_path: Path) -> None:
    save(hf_model("llama"), tmp_path)
    expected = {f"absent.{i}": (1,) for i in range(25)}
    with pytest.raises(WeightsError, match=r"absent\.0, .*, absent\.19 and 5 more; not in"):
        HFWeights(tmp_path).check(expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    model = hf_model("llama")
    save(model, tmp_path)
    path = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(dtype)}, path)
    with pytest.raises(WeightsError, match=f"quantised, must be BF16 or .*: {name} [FI]8"):
        open_weights(tmp_path, architecture_of(model.config))


def test_a_tensor_in_two_files_is_named_with_both(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: 2 * tensor}, second)
    with pytest.raises(WeightsError, match=f"{name} is in {first.name} and in {second.name}"):
        HFWeights(tmp_path)


def test_weights_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    """transformers reads the one, SGLang the other."""
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"has both model\.safetensors and model\.safe"):
        HFWeights(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_named(tmp_path: Path, index: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(WeightsError, match=f"{path}: (not a safetensors index|names files that)"):
        HFWeights(tmp_path)


def test_an_output_layer_may_be_a_copy_of_tied_embeddings_and_nothing_else(tmp_path: Path) -> None:
    """Else transformers would compute with it and the trainer without."""
    model = hf_model("llama", tied=True)
    save(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, path)
    open_weights(tmp_path, architecture_of(model.config))
    save_file(tensors | {"lm_head.weight": 2 * embedding}, path)
    with pytest.raises(WeightsError, match=r"lm_head\.weight is not model\.embed"):
        open_weights(tmp_path, architecture_of(model.config))


@pytest.mark.parametrize("shard_bytes", [5 << 30, 60_000])
def test_a_written_directory_loads_in_transformers(tmp_path: Path, shard_bytes: int) -> None:
    model = hf_model("llama")
    source = save(model, tmp_path / "source")
    (source / "tokenizer.json").write_text('{"a": 1}')
    tensors = list(model.state_dict().items())
    target = tmp_path / "target"
    buckets = ([pair] for pair in reversed(tensors))
    write_hf_dir(target, buckets, torch.float32, source, shapes_of(tensors), shard_bytes)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert all(torch.equal(loaded.state_dict()[name], t) for name, t in tensors)
    assert (target / "tokenizer.json").read_text() == '{"a": 1}'
    num_files = len(list(target.glob("*.safetensors")))
    assert num_files == 1 if shard_bytes > 1 << 30 else num_files > 1


def test_the_config_says_what_precision_was_written(tmp_path: Path) -> None:
    model = hf_model("llama")
    source = save(model, tmp_path / "source")
    bucket = [(name, t.bfloat16()) for name, t in model.state_dict().items()]
    write_hf_dir(tmp_path / "target", [bucket], torch.bfloat16, source, shapes_of(bucket))
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_a_write_that_fails_leaves_the_previous_directory(tmp_path: Path) -> None:
    model = hf_model("llama")
    source = save(model, tmp_path / "source")
    target = tmp_path / "target"
    first = [("a", torch.ones(2))]
    write_hf_dir(target, [first], torch.float32, source, {"a": (2,)})

    def failing():  # type: ignore[no-untyped-def]
        yield [("a", torch.zeros(2))]
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_hf_dir(target, failing(), torch.float32, source, {"a": (2,), "b": (1,)})
    assert torch.equal(HFWeights(target)["a"], torch.ones(2))

    write_hf_dir(target, [[("a", torch.zeros(2))]], torch.float32, source, {"a": (2,)})
    assert torch.equal(HFWeights(target)["a"], torch.zeros(2))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("target")] == [
        "target"
    ]
