"""GGUF files of Llama-shaped models as Hugging Face directories.

llama.cpp's format holds weights (often quantised in blocks), the model's shape and its tokenizer in
one file. `import_gguf` writes what the trainer and SGLang read: config.json, safetensors and
tokenizer files. The weights are the dequantised ones: what llama.cpp computes with.

llama.cpp rotates neighbouring pairs of a head's dimensions where Hugging Face rotates its two
halves, so the rows of the query and key projections are in another order there:

    row 2 i + s of a head in the file   =   row i + s D / 2 of that head here,   s in {0, 1}

Shapes: D head size, H hidden size, A heads (of queries, or of keys).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

from megatron_magistral.weights.architecture import Architecture, architecture_of
from megatron_magistral.weights.hf_dir import write_hf_dir
from megatron_magistral.weights.names import hf_shapes

_ARCHITECTURE = "llama"  # Llama, Mistral, SmolLM: llama.cpp's name for all of them


class GgufError(ValueError):
    """A file that cannot be imported; the message names the file, the key and the value."""


def import_gguf(path: Path, target: Path, dtype: torch.dtype = torch.float32) -> Architecture:
    """Writes the model of the GGUF file `path` to the directory `target`, which is replaced if it
    exists. Returns its architecture. Raises GgufError or ArchitectureError; `target` is then as it
    was."""
    file = _open(path)
    config = _config(file, path)
    arch = architecture_of(config)
    tensors = _hf_tensors(file, arch, path)
    with tempfile.TemporaryDirectory() as directory:
        side = Path(directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.save_pretrained(side)
        config.save_pretrained(side)
        buckets = ([(name, tensor.to(dtype))] for name, tensor in tensors)
        write_hf_dir(target, buckets, dtype, side, hf_shapes(arch))
    return arch


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise GgufError(f"{path}: cannot be read as GGUF: {error}") from None


def _config(file: gguf.GGUFReader, path: Path) -> transformers.LlamaConfig:
    def value(key: str) -> Any:
        field = file.get_field(key)
        if field is None:
            raise GgufError(f"{path}: has no {key}")
        return field.contents()

    def optional(key: str) -> Any:
        field = file.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture != _ARCHITECTURE:
        raise GgufError(
            f"{path}: general.architecture = {architecture!r}; only {_ARCHITECTURE!r} is supported"
        )
    for key, plain in (("rope.scaling.type", "none"), ("expert_count", 0)):
        if (found := optional(f"llama.{key}")) not in (None, plain):
            raise GgufError(f"{path}: llama.{key} = {found!r} is not supported; must be {plain!r}")
    num_heads = value("llama.attention.head_count")
    hidden_size = value("llama.embedding_length")
    names = {tensor.name for tensor in file.tensors}
    if "rope_freqs.weight" in names:
        raise GgufError(f"{path}: has rope_freqs.weight: scaled RoPE is not supported")
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(value("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=optional("llama.attention.head_count_kv") or num_heads,
        head_dim=optional("llama.attention.key_length") or hidden_size // num_heads,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": optional("llama.rope.freq_base") or 10000.0,
        },
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=optional("tokenizer.ggml.bos_token_id"),
        eos_token_id=optional("tokenizer.ggml.eos_token_id"),
        pad_token_id=optional("tokenizer.ggml.padding_token_id"),
    )


def _hf_tensors(
    file: gguf.GGUFReader, arch: Architecture, path: Path
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, fp32 tensor), one at a time. Checks names and shapes before the first."""
    name_map = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, arch.num_layers)
    shapes = hf_shapes(arch)
    wanted = {name: str(name_map.get_name(name, try_suffixes=(".weight",))) for name in shapes}
    found = {tensor.name: tensor for tensor in file.tensors}
    missing = [name for name in wanted.values() if name not in found]
    extra = found.keys() - wanted.values()
    wrong = [
        f"{gguf_name} {_shape(found[gguf_name])}, must be {shapes[name]}"
        for name, gguf_name in wanted.items()
        if gguf_name in found and _shape(found[gguf_name]) != shapes[name]
    ]
    kinds = (("missing", missing), ("unknown", sorted(extra)), ("wrong shape", wrong))
    if problems := [f"{kind}: {', '.join(names)}" for kind, names in kinds if names]:
        raise GgufError(f"{path}: tensors {'; '.join(problems)}")
    return ((name, _dequantise(found[wanted[name]], name, arch)) for name in shapes)


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """As torch has it: the file lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _dequantise(tensor: gguf.ReaderTensor, hf_name: str, arch: Architecture) -> Tensor:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    weight = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(_shape(tensor))
    if hf_name.endswith("q_proj.weight"):
        return _halves(weight, arch.num_heads)
    if hf_name.endswith("k_proj.weight"):
        return _halves(weight, arch.num_kv_heads)
    return weight


def _halves(weight: Tensor, num_heads: int) -> Tensor:
    """[A D, H] with the rows of a head as neighbouring pairs -> as two halves."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])  # [A, D / 2, 2, H]
    return pairs.transpose(1, 2).reshape(weight.shape)
