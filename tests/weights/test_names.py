"""The name table: shards of every family put together again are the Hugging Face tensors."""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch
from safetensors.torch import load_file

from megatron_magistral.weights.architecture import Architecture, architecture_of
from megatron_magistral.weights.names import (
    hf_shapes,
    name_in_model,
    padded_vocab_size,
    parameters,
    shard,
    shard_shape,
    unshard,
)
from tests.trainer.models import EXPERT_FAMILIES, FAMILIES, VOCAB_SIZE, by_checkpoint_name, hf_model

MODELS = [(family, tied) for family in FAMILIES for tied in (False, True)]


@functools.cache
def _model(family: str, tied: bool) -> tuple[Architecture, dict[str, torch.Tensor]]:
    """The tensors as a checkpoint has them, each expert's its own."""
    model = hf_model(family, tied=tied)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return architecture_of(model.config), load_file(f"{directory}/model.safetensors")


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_the_table_has_each_tensor_of_transformers_with_its_shape(family: str, tied: bool) -> None:
    arch, tensors = _model(family, tied)
    assert hf_shapes(arch) == {name: tuple(t.shape) for name, t in tensors.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_unsharding_the_shards_gives_the_same_bits(family: str, tied: bool, tp_size: int) -> None:
    arch, tensors = _model(family, tied)
    back: dict[str, torch.Tensor] = {}
    for param in parameters(arch).values():
        sources = [tensors[name] for name in param.sources]
        shards = [shard(param, sources, rank, tp_size) for rank in range(tp_size)]
        assert {tuple(part.shape) for part in shards} == {shard_shape(param, tp_size)}
        if not param.is_copy:
            back |= dict(unshard(param, shards))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_vocabulary_is_padded_with_zeros_to_a_multiple_of_the_ranks(tp_size: int) -> None:
    arch, tensors = _model("llama", False)
    param = parameters(arch)["output_layer.weight"]
    full = torch.cat(
        [shard(param, [tensors["lm_head.weight"]], r, tp_size) for r in range(tp_size)]
    )
    assert len(full) == padded_vocab_size(VOCAB_SIZE, tp_size)
    assert len(full) % tp_size == 0
    assert len(full) - VOCAB_SIZE < tp_size
    assert not full[VOCAB_SIZE:].any()


def test_each_rank_holds_whole_kv_groups() -> None:
    """Queries must sit with the key and value that they attend with."""
    arch, tensors = _model("llama", False)
    param = parameters(arch)["decoder.layers.0.self_attention.linear_qkv.weight"]
    q, k, v = (tensors[name] for name in param.sources)
    heads, groups, size = arch.num_heads, arch.num_kv_heads, arch.head_dim
    second = shard(param, [q, k, v], 1, 2)
    per_group = heads // groups
    first_group = groups // 2
    expected = torch.cat(
        [
            torch.cat(
                [
                    q[group * per_group * size : (group + 1) * per_group * size],
                    k[group * size : (group + 1) * size],
                    v[group * size : (group + 1) * size],
                ]
            )
            for group in range(first_group, groups)
        ]
    )
    assert torch.equal(second, expected)


def test_transformer_engine_names_differ_only_in_the_norms() -> None:
    arch, _ = _model("qwen3", False)
    local, fused = parameters(arch), parameters(arch, fused_norms=True)
    assert [p.sources for p in local.values()] == [p.sources for p in fused.values()]
    renamed = {new.rsplit(".", 1)[-1] for old, new in zip(local, fused, strict=True) if old != new}
    assert renamed == {"layer_norm_weight"}


def test_transformer_engine_fuses_no_norm_into_experts() -> None:
    arch, _ = _model("mixtral", False)
    fused = parameters(arch, fused_norms=True)
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in fused
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in fused


def test_the_parameters_of_an_expert_carry_its_number() -> None:
    arch, _ = _model("qwen3_moe", False)
    params = parameters(arch).values()
    assert {p.expert for p in params} == {None, 0, 1, 2, 3}
    assert all((f".local_experts.{p.expert}." in p.name) == (p.expert is not None) for p in params)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_the_tests_name_the_tensors_of_experts_as_a_checkpoint_does(family: str) -> None:
    _, tensors = _model(family, False)
    found = by_checkpoint_name(family, hf_model(family).state_dict())
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("output_layer.weight", "output_layer.weight"),
        (
            "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
            "decoder.layers.7.mlp.shared_experts.linear_fc1.weight",
        ),
        (
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight",
            "decoder.layers.6.mlp.experts.local_experts.13.linear_fc2.weight",
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc1.weight11",
            "decoder.layers.6.mlp.experts.local_experts.23.linear_fc1.weight",
        ),
    ],
)
def test_a_name_in_a_chunk_becomes_that_in_the_model(name: str, want: str) -> None:
    """The second chunk of six layers, the second of ranks with twelve experts."""
    assert name_in_model(name, layers=range(6, 12), first_expert=12) == want
