"""Safetensors files that are filled tensor by tensor, in any order.

The library writes a file from all of its tensors at once. Here names, shapes and dtype are known
before the first tensor comes: headers are written first, every tensor goes to its place when it
arrives, and none is kept.

    num_bytes of the header (u64) | header (JSON) | tensors, without gaps, at the header's offsets
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_magistral.weights.plan import cut

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Shapes = Mapping[str, tuple[int, ...]]

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
FLOATING_DTYPES = frozenset(_DTYPE_NAMES.values())
"""What a header calls the dtypes of weights that are not quantised."""
_ALIGNMENT = 8  # of the first tensor in its file


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies: `begin` counts from the start of the file."""

    path: Path
    begin: int
    shape: tuple[int, ...]


class TensorStream:
    """A model's weights in `directory`: one file, or several of about `file_bytes` and an index.

    `shapes` are of every tensor that will come. Raises ValueError for one that is not expected, is
    not as expected, or comes twice, and in `finish` for those that did not come.
    """

    def __init__(
        self, directory: Path, shapes: Shapes, dtype: torch.dtype, file_bytes: int
    ) -> None:
        self._dtype = dtype
        self._places: dict[str, _Place] = {}
        self._paths: list[Path] = []
        groups = list(cut(list(shapes), lambda n: prod(shapes[n]) * dtype.itemsize, file_bytes))
        for number, names in enumerate(groups, start=1):
            path = directory / SINGLE
            if len(groups) > 1:
                path = directory / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            self._begin_file(path, {name: shapes[name] for name in names})
        if len(groups) > 1:
            self._write_index(directory)
        self._expected = set(shapes)

    def write(self, name: str, tensor: Tensor) -> None:
        if name not in self._expected:
            when = "came before" if name in self._places else "is not one of the model's tensors"
            raise ValueError(f"{name}: {when}")
        place = self._places[name]
        if tensor.dtype != self._dtype or tuple(tensor.shape) != place.shape:
            raise ValueError(
                f"{name}: {tensor.dtype} {list(tensor.shape)}, must be {self._dtype} "
                f"{list(place.shape)}"
            )
        self._expected.remove(name)
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        with place.path.open("r+b") as file:
            file.seek(place.begin)
            file.write(content.data)

    def finish(self) -> None:
        """Returns when the files are on the disk."""
        if self._expected:
            raise ValueError(f"tensors that did not come: {', '.join(sorted(self._expected))}")
        for path in self._paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _begin_file(self, path: Path, shapes: Shapes) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + prod(shape) * self._dtype.itemsize
            header[name] = {
                "dtype": _DTYPE_NAMES[self._dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % _ALIGNMENT)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            first = file.tell()
            file.truncate(first + end)
        self._paths.append(path)
        for name, shape in shapes.items():
            begin, _ = header[name]["data_offsets"]
            self._places[name] = _Place(path, first + begin, tuple(shape))

    def _write_index(self, directory: Path) -> None:
        num_elements = sum(prod(place.shape) for place in self._places.values())
        index = {
            "metadata": {"total_size": num_elements * self._dtype.itemsize},
            "weight_map": {name: place.path.name for name, place in self._places.items()},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_buckets(
    directory: Path,
    buckets: Iterable[list[tuple[str, Tensor]]],
    shapes: Shapes,
    dtype: torch.dtype,
    file_bytes: int,
) -> None:
    """The tensors of `buckets` as files. Buckets are emptied as they are written, so that one is
    gone before the next is made."""
    stream = TensorStream(directory, shapes, dtype, file_bytes)
    for bucket in buckets:
        while bucket:
            stream.write(*bucket.pop())
    stream.finish()
