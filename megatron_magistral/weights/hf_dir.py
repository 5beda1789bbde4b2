"""Hugging Face model directories: safetensors read lazily, and written as a stream.

Names, shapes and dtypes are checked by the headers of the files, before anything large is read. A
written directory appears under its name only when it is complete: everything is written next to it
and renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.names import hf_shapes
from megatron_magistral.weights.safetensors_stream import (
    FLOATING_DTYPES,
    INDEX,
    SINGLE,
    Shapes,
    write_buckets,
)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_FILE_BYTES = 5 << 30
_MAX_NAMED = 20


class WeightsError(ValueError):
    """Weights that do not fit; the message names the files or tensors that are wrong, of a kind
    the first twenty."""


class HFWeights:
    """The tensors of a model directory by name, read when asked for. One file or many shards."""

    def __init__(self, hf_dir: Path) -> None:
        """Reads the headers only. Raises WeightsError if a file is missing or damaged."""
        self._hf_dir = hf_dir
        self._file_of: dict[str, Path] = {}
        self._dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(hf_dir):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                        header = file.get_slice(name)
                        self._add(name, path, header.get_dtype(), tuple(header.get_shape()))
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path}: cannot be read as safetensors: {error}") from None

    def _add(self, name: str, path: Path, dtype: str, shape: tuple[int, ...]) -> None:
        if name in self._file_of:
            raise WeightsError(
                f"{self._hf_dir}: {name} is in {self._file_of[name].name} and in {path.name}"
            )
        self._file_of[name], self._dtypes[name], self.shapes[name] = path, dtype, shape

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()) -> None:
        """Raises one WeightsError that names the missing tensors, the extra ones (but those in
        `ignored`), and those whose shape or dtype is wrong."""
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
        # Any number could be cast to a weight, but without its scale it would be another one.
        quantised = [
            f"{name} {self._dtypes[name]}"
            for name in expected
            if self._dtypes.get(name, "F32") not in FLOATING_DTYPES
        ]
        kinds = {
            "missing": missing,
            "not in this architecture": extra,
            "wrong shape": wrong,
            f"quantised, must be {' or '.join(sorted(FLOATING_DTYPES))}": quantised,
        }
        problems = [f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names]
        if problems:
            raise WeightsError(f"{self._hf_dir}: tensors {'; '.join(problems)}")


def open_weights(hf_dir: Path, arch: Architecture) -> HFWeights:
    """The weights of a model directory, checked against its architecture. Raises WeightsError."""
    weights = HFWeights(hf_dir)
    # Where embeddings are tied, a directory may hold the output layer's copy of them too.
    weights.check(hf_shapes(arch), [_HEAD] if arch.tied_embeddings else [])
    has_copy = arch.tied_embeddings and _HEAD in weights.shapes
    if has_copy and not torch.equal(weights[_HEAD], weights[_EMBEDDING]):
        raise WeightsError(
            f"{hf_dir}: {_HEAD} is not {_EMBEDDING}, but config.json says "
            "tie_word_embeddings = true: set it to false, or delete the tensor"
        )
    return weights


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _weight_files(hf_dir: Path) -> list[Path]:
    index, single = hf_dir / INDEX, hf_dir / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise WeightsError(f"{hf_dir}: has neither {SINGLE} nor {INDEX}")
        return [single]
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: not a safetensors index: {error!r}") from None
    if absent := [name for name in names if not (hf_dir / name).is_file()]:
        raise WeightsError(f"{index}: names files that are absent: {_listed(absent)}")
    if single.is_file() and SINGLE not in names:
        raise WeightsError(
            f"{hf_dir}: has both {SINGLE} and {INDEX}, which does not name it: delete the one that "
            "is out of date"
        )
    return [hf_dir / name for name in names]


def write_hf_dir(
    target: Path,
    buckets: Iterable[list[tuple[str, Tensor]]],
    dtype: torch.dtype,
    template_dir: Path,
    shapes: Shapes,
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Writes a model directory: the tensors of `buckets` in files of about `file_bytes`, and all
    that is not weights (config, tokenizer, chat template) as in `template_dir`.

    Each tensor is written as it comes, and buckets are emptied: one is in memory at a time.
    `shapes` are of all of them: raises ValueError if what comes is anything else. Replaces `target`
    if it exists.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _copy_side_files(template_dir, partial, dtype)
    write_buckets(partial, buckets, shapes, dtype, file_bytes)
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


def _replace(partial: Path, target: Path) -> None:
    """A directory cannot be renamed over another that has files: move the old one away first."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)
