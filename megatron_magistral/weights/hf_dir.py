"""Hugging Face model directories: safetensors read lazily, and written as a stream.

A directory appears under its name only when it is complete: everything is written next to it and
renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.names import hf_shapes

_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_SHARD_BYTES = 5 << 30


class WeightsError(ValueError):
    """Weights that do not fit; the message names every file or tensor that is wrong."""


class HFWeights:
    """The tensors of a model directory by name, read when asked for. One file or many shards."""

    def __init__(self, hf_dir: Path) -> None:
        """Reads the headers only. Raises WeightsError if a file is missing or damaged."""
        self._hf_dir = hf_dir
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(hf_dir):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                        self._file_of[name] = path
                        self.shapes[name] = tuple(file.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path}: cannot be read as safetensors: {error}") from None

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Raises one WeightsError that names each missing tensor, each extra one (but those in
        `ignored`), and each of a wrong shape."""
        missing = [name for name in expected if name not in self.shapes]
        # Old checkpoints carry the RoPE frequencies, which are a function of the config.
        extra = [
            name
            for name in self.shapes
            if name not in expected
            and name not in set(ignored)
            and not name.endswith("rotary_emb.inv_freq")
        ]
        wrong = [
            f"{name} {list(self.shapes[name])}, must be {list(shape)}"
            for name, shape in expected.items()
            if name in self.shapes and self.shapes[name] != tuple(shape)
        ]
        kinds = (("missing", missing), ("not in this architecture", extra), ("wrong shape", wrong))
        problems = [f"{kind}: {', '.join(names)}" for kind, names in kinds if names]
        if problems:
            raise WeightsError(f"{self._hf_dir}: tensors {'; '.join(problems)}")


def open_weights(hf_dir: Path, arch: Architecture) -> HFWeights:
    """The weights of a model directory, checked against its architecture. Raises WeightsError."""
    weights = HFWeights(hf_dir)
    # Where embeddings are tied, a directory may hold the output layer's copy of them too.
    weights.check(hf_shapes(arch), ["lm_head.weight"] if arch.tied_embeddings else [])
    return weights


def _weight_files(hf_dir: Path) -> list[Path]:
    index = hf_dir / _INDEX
    if not index.is_file():
        single = hf_dir / "model.safetensors"
        if not single.is_file():
            raise WeightsError(f"{hf_dir}: has neither {single.name} nor {_INDEX}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise WeightsError(f"{index}: not a safetensors index: {error!r}") from None
    if absent := [name for name in names if not (hf_dir / name).is_file()]:
        raise WeightsError(f"{index}: names files that are absent: {', '.join(absent)}")
    return [hf_dir / name for name in names]


def write_hf_dir(
    target: Path,
    buckets: Iterable[list[tuple[str, Tensor]]],
    dtype: torch.dtype,
    template_dir: Path,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a model directory: the tensors of `buckets` in files of about `shard_bytes`, and all
    that is not weights (config, tokenizer, chat template) as in `template_dir`.

    Holds at most one file's tensors in memory. Replaces `target` if it exists.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _copy_side_files(template_dir, partial, dtype)
    _write_shards(partial, buckets, shard_bytes)
    _replace(partial, target)


def link_hf_dir(source: Path, target: Path) -> None:
    """Makes `target` a directory of the same files as `source`: they take no space of their own
    where the filesystem has hard links. Replaces `target` if it exists."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_link_or_copy)
    _replace(partial, target)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _copy_side_files(source: Path, target: Path, dtype: torch.dtype) -> None:
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weights:
            shutil.copyfile(path, target / path.name)
    config_path = target / "config.json"
    config = json.loads(config_path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def _write_shards(
    target: Path, buckets: Iterable[list[tuple[str, Tensor]]], shard_bytes: int
) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    written: list[tuple[list[str], int]] = []  # names and bytes, per file

    def flush() -> None:
        shard = shards.pop()
        save_file(shard, target / f"{len(written)}.safetensors", metadata={"format": "pt"})
        written.append((list(shard), sum(t.nbytes for t in shard.values())))
        shards.append({})

    for bucket in buckets:
        for name, tensor in bucket:
            if (
                shards[0]
                and sum(t.nbytes for t in shards[0].values()) + tensor.nbytes > shard_bytes
            ):
                flush()
            # A view would be saved with the whole storage of its bucket.
            shards[0][name] = tensor.detach().to("cpu", copy=True).contiguous()
    flush()

    if len(written) == 1:
        (target / "0.safetensors").rename(target / "model.safetensors")
        return
    weight_map = {}
    for number, (names, _) in enumerate(written):
        file_name = f"model-{number + 1:05d}-of-{len(written):05d}.safetensors"
        (target / f"{number}.safetensors").rename(target / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    total_size = sum(num_bytes for _, num_bytes in written)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _replace(partial: Path, target: Path) -> None:
    """A directory cannot be renamed over another that has files: move the old one away first."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
