"""What is read of a Hugging Face config, and which configs are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron_magistral.weights.architecture import (
    ArchitectureError,
    Experts,
    Family,
    architecture_of,
    read_architecture,
)
from tests.trainer.models import FAMILIES, hf_model

ROPES = {
    "default": dict(rope_type="default", rope_theta=5e5),
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    "llama3": dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    ),
    "yarn": dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128
    ),
}


def test_every_family_is_tested() -> None:
    assert set(FAMILIES) == set(Family)


@pytest.mark.parametrize("rope", ROPES)
def test_rope_frequencies_are_those_of_transformers(rope: str) -> None:
    model = hf_model("llama", rope_parameters=ROPES[rope])
    arch = architecture_of(model.config)
    rotary = model.model.rotary_emb
    assert torch.equal(torch.tensor(arch.rope_inv_freq), rotary.inv_freq)
    assert arch.rope_attention_factor == pytest.approx(rotary.attention_scaling)


def test_mistral_has_its_window_on_every_layer() -> None:
    assert architecture_of(hf_model("mistral", sliding_window=8).config).windows == (8,) * 4


def test_qwen_has_its_window_on_the_upper_layers_only() -> None:
    config = hf_model(
        "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=3
    ).config
    assert architecture_of(config).windows == (None, None, None, 8)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.GPT2Config(), "model_type='gpt2' is unknown; known: llama, mistral"),
        (transformers.LlamaConfig(attention_bias=True), "attention_bias=True"),
        (transformers.Qwen3MoeConfig(decoder_sparse_step=2), "decoder_sparse_step=2"),
        (transformers.Qwen3MoeConfig(mlp_only_layers=[0]), r"mlp_only_layers=\[0\]"),
        (transformers.Qwen2MoeConfig(qkv_bias=False), "qkv_bias=False"),
        (transformers.MixtralConfig(num_experts_per_tok=9), "must be from 1 to the 8 experts"),
        (transformers.MixtralConfig(num_experts_per_tok=1), "the router cannot learn"),
        (transformers.LlamaConfig(hidden_act="gelu"), "hidden_act='gelu'"),
        (
            transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=3),
            "num_key_value_heads=3 must divide num_attention_heads=32",
        ),
        (transformers.MistralConfig(sliding_window=0), "sliding_window=0 must be at least 1"),
        (
            transformers.LlamaConfig(
                rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
            ),
            "partial_rotary_factor=0.5",
        ),
        (
            transformers.LlamaConfig(
                rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
            ),
            "rope_type='dynamic'",
        ),
    ],
)
def test_what_has_no_mapping_is_refused_by_name(
    config: transformers.PretrainedConfig, words: str
) -> None:
    with pytest.raises(ArchitectureError, match=words):
        architecture_of(config)


def test_the_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match=f"{tmp_path}/config.json: no such file"):
        read_architecture(tmp_path)
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ArchitectureError, match=f"{tmp_path}/config.json: model_type='gpt2'"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type=None is unknown; known: llama, mistral"),
        ({"hidden_size": "64"}, "'hidden_size' expected int, got str"),
        ({"num_attention_heads": 7}, r"hidden size \(64\) is not a multiple of the number"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            "Missing required keys in `rope_parameters` for 'rope_type'='llama3'",
        ),
    ],
    ids=["no-type", "text", "heads", "rope"],
)
def test_a_config_that_makes_no_sense_is_one_line_that_names_the_file(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    hf_model("llama").config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ArchitectureError, match=f"{path}: .*{words}") as error:
        read_architecture(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"), [("{", "Expecting property name"), ("[]", "is not a JSON object")]
)
def test_a_config_that_is_not_json_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ArchitectureError, match=f"{path}: {words}"):
        read_architecture(tmp_path)


def test_code_that_comes_with_a_model_is_neither_run_nor_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = {"model_type": "martian", "auto_map": {"AutoConfig": "theirs.MartianConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "theirs.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ArchitectureError, match="model_type='martian' is unknown"):
        read_architecture(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_saved_config_reads_the_same(tmp_path: Path) -> None:
    config = hf_model("qwen3", tied=True).config
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    assert read_architecture(tmp_path) == architecture_of(config)


def test_the_routing_of_each_family_is_read() -> None:
    found = {
        family: architecture_of(hf_model(family).config).experts
        for family in ("llama", "mixtral", "qwen2_moe", "qwen3_moe")
    }
    assert found == {
        "llama": None,
        "mixtral": Experts(4, 48, top_k=2, normalises_scores=True),
        "qwen2_moe": Experts(4, 48, top_k=2, normalises_scores=False, shared_ffn_hidden_size=96),
        "qwen3_moe": Experts(4, 48, top_k=2, normalises_scores=True),
    }
