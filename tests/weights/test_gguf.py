"""GGUF files, written here as llama.cpp writes them, and what the import makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import Tensor

from megatron_magistral.weights.gguf import GgufError, import_gguf
from tests.trainer.models import hf_model

ALPHABET = [chr(i) for i in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
TOKENS = ["<end>", "<start>", *ALPHABET, "Ġt", "he", "Ġthe"]
MERGES = ["Ġ t", "h e", "Ġt he"]
CONTROL, NORMAL = 3, 1


def _model(tied: bool) -> Any:
    return hf_model("llama", tied=tied, vocab_size=len(TOKENS), rms_norm_eps=1e-5)


def _pairs(weight: Tensor, num_heads: int) -> Tensor:
    """As llama.cpp's converter orders the rows of queries and keys."""
    halves = weight.view(num_heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _write(path: Path, model: Any, architecture: str = "llama", **extra: Any) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([CONTROL, CONTROL, *[NORMAL] * (len(TOKENS) - 2)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    for key, value in extra.items():
        writer.add_string(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _pairs(weight, heads[name[-len("q_proj.weight")]])
        writer.add_tensor(names.get_name(name, (".weight",)), weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_the_import_is_the_model_that_was_exported(tmp_path: Path, tied: bool) -> None:
    model = _model(tied)
    import_gguf(_write(tmp_path / "model.gguf", model), tmp_path / "hf")
    imported = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.arange(40)[None]
    assert torch.equal(imported(tokens).logits, model(tokens).logits)


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    import_gguf(_write(tmp_path / "model.gguf", _model(False)), tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("over the top<end>").input_ids
    assert [TOKENS[i] for i in ids] == [*"over", "Ġthe", "Ġt", "o", "p", "<end>"]
    assert tokenizer.decode(ids) == "over the top<end>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "model.gguf", _model(False), architecture="gemma")
    with pytest.raises(GgufError, match=r"general.architecture = 'gemma'; only 'llama'"):
        import_gguf(path, tmp_path / "hf")


def test_scaled_rope_is_refused_rather_than_ignored(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "yarn"}
    path = _write(tmp_path / "model.gguf", _model(False), **extra)
    with pytest.raises(GgufError, match=r"llama.rope.scaling.type = 'yarn' is not supported"):
        import_gguf(path, tmp_path / "hf")


def test_missing_tensors_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    model = _model(False)
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(GgufError, match=r"tensors missing: blk.1.ffn_up.weight$"):
        import_gguf(_write(tmp_path / "model.gguf", model), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"no weights here")
    with pytest.raises(GgufError, match=r"model.gguf: cannot be read as GGUF"):
        import_gguf(path, tmp_path / "hf")
