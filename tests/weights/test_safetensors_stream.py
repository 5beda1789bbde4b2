"""Safetensors files that are filled tensor by tensor, read back by the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_magistral.weights.safetensors_stream import TensorStream, write_buckets

SHAPES = {"a": (3, 5), "norm": (7,), "b": (2, 3, 4)}


def _tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def _read(directory: Path) -> dict[str, Tensor]:
    return {n: t for path in directory.glob("*.safetensors") for n, t in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", [["a", "norm", "b"], ["b", "a", "norm"]])
@pytest.mark.parametrize(("file_bytes", "num_files"), [(1 << 20, 1), (1, 3)])
def test_what_is_written_in_any_order_is_what_the_library_reads(
    tmp_path: Path, dtype: torch.dtype, order: list[str], file_bytes: int, num_files: int
) -> None:
    tensors = _tensors(dtype)
    stream = TensorStream(tmp_path, SHAPES, dtype, file_bytes)
    for name in order:
        stream.write(name, tensors[name])
    stream.finish()
    assert len(list(tmp_path.glob("*.safetensors"))) == num_files
    found = _read(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == dtype for name in tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_part_of_a_larger_tensor_is_written_alone(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    stream = TensorStream(tmp_path, {"a": (4, 2)}, torch.float32, 1 << 20)
    stream.write("a", whole[:, 1:3])
    stream.finish()
    assert torch.equal(_read(tmp_path)["a"], whole[:, 1:3])


def test_what_was_not_announced_is_refused_by_name(tmp_path: Path) -> None:
    stream = TensorStream(tmp_path, SHAPES, torch.float32, 1 << 20)
    stream.write("norm", torch.zeros(7))
    with pytest.raises(ValueError, match=r"^norm: came before"):
        stream.write("norm", torch.zeros(7))
    with pytest.raises(ValueError, match=r"^c: is not one of the model's tensors"):
        stream.write("c", torch.zeros(7))
    with pytest.raises(ValueError, match=r"^a: torch.float32 \[5, 3\], must be .* \[3, 5\]"):
        stream.write("a", torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"^a: torch.bfloat16 \[3, 5\], must be torch.float32"):
        stream.write("a", torch.zeros(3, 5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="tensors that did not come: a, b"):
        stream.finish()


def test_a_bucket_is_gone_before_the_next_is_made(tmp_path: Path) -> None:
    buckets = [[("a", torch.zeros(3, 5)), ("norm", torch.zeros(7))], [("b", torch.zeros(2, 3, 4))]]

    def made_in_turn():
        for bucket in buckets:
            yield bucket
            assert bucket == []

    write_buckets(tmp_path, made_in_turn(), SHAPES, torch.float32, 1 << 20)
    assert _read(tmp_path).keys() == SHAPES.keys()
