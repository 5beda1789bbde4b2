"""The tiny tokenizer and the initial model directory, read back by Hugging Face's own loaders."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from megatron_magistral.data.tiny_world import generate
from megatron_magistral.data.tokenizer import (
    TinyModelShape,
    build_initial_model,
    build_tokenizer,
)

SHAPE = TinyModelShape(hidden_size=32, intermediate_size=64, num_hidden_layers=2)


@pytest.fixture(scope="module")
def texts():
    world = generate(seed=0, num_train=400, num_held_out=100, num_traces=800)
    statements = [problem.statement for problem in world.train]
    return statements + [trace.response for trace in world.traces]


@pytest.fixture(scope="module")
def tokenizer(texts):
    return build_tokenizer(texts)


def round_trip(tokenizer, text):
    return tokenizer.decode(
        tokenizer(text, add_special_tokens=False).input_ids, skip_special_tokens=True
    )


def test_every_text_of_the_world_survives_encode_and_decode(tokenizer, texts):
    held_out = generate(seed=0, num_train=0, num_held_out=100, num_traces=0).held_out
    for text in texts + [problem.statement for problem in held_out]:
        assert round_trip(tokenizer, text) == text


@pytest.mark.parametrize(
    "text", ["", "  a\t\n\n b ", "naïve Ω 漢字 🙂", "12 345", "</s <think", " ."]
)
def test_text_never_seen_survives_too(tokenizer, text):
    assert round_trip(tokenizer, text) == text


def test_digits_and_think_tags_are_single_tokens(tokenizer):
    ids = tokenizer("<think>1234</think>", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<think>", "1", "2", "3", "4", "</think>"]
    assert not set(tokenizer.convert_tokens_to_ids(["<think>", "</think>"])) & set(
        tokenizer.all_special_ids
    )


def test_bos_comes_first_unless_refused(tokenizer):
    assert tokenizer("Hi").input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in tokenizer("Hi", add_special_tokens=False).input_ids


def test_the_same_texts_give_the_same_tokenizer(tokenizer, texts):
    assert build_tokenizer(texts).get_vocab() == tokenizer.get_vocab()


def test_the_vocabulary_has_exactly_the_size_asked_for_even_with_little_text():
    tokenizer = build_tokenizer(["one short text"], vocab_size=320)
    assert len(tokenizer) == 320
    assert all(isinstance(tokenizer.decode([token_id]), str) for token_id in range(320))
    assert round_trip(tokenizer, "one short text") == "one short text"


def test_a_vocabulary_below_the_bytes_is_refused(texts):
    with pytest.raises(ValueError, match="vocab_size is 100; it must be at least 261"):
        build_tokenizer(texts, vocab_size=100)


def test_the_saved_tokenizer_loads_and_encodes_alike(tokenizer, texts, tmp_path):
    build_initial_model(tmp_path, tokenizer, SHAPE, seed=0)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in texts[::50]:
        assert loaded(text).input_ids == tokenizer(text).input_ids
    ids = tokenizer(texts[-1]).input_ids
    assert loaded.decode(ids) == tokenizer.decode(ids)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name)


@pytest.mark.parametrize("tied", [False, True])
def test_the_initial_model_is_whole_seeded_and_evenly_divisible(tokenizer, tmp_path, tied):
    shape = TinyModelShape(tie_word_embeddings=tied)
    state = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build_initial_model(tmp_path / name, tokenizer, shape, seed)
    assert torch.equal(torch.random.get_rng_state(), state)

    config = json.loads((tmp_path / "a" / "config.json").read_text())
    first, again, other = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert ("lm_head.weight" in first) is not tied
    assert 1e6 < sum(weight.numel() for weight in first.values()) + tied * 131072 < 3e6
    for key in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size"):
        assert config[key] % 2 == 0
    assert config["vocab_size"] % 64 == 0 and config["vocab_size"] == len(tokenizer)


def test_initial_weights_are_scaled_by_width_and_residual_projections_by_depth(tokenizer, tmp_path):
    build_initial_model(tmp_path, tokenizer, TinyModelShape(), seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    for index in range(4):
        layer = f"model.layers.{index}"
        for name in ("self_attn.q_proj", "mlp.up_proj"):
            std = float(weights[f"{layer}.{name}.weight"].std())
            assert std == pytest.approx(128**-0.5, rel=0.05)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            std = float(weights[f"{layer}.{name}.weight"].std())
            assert std == pytest.approx((128 * 2 * 4) ** -0.5, rel=0.05)
