"""The formulas for a GPU's memory, against real trainers on the CPU and against known models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_magistral.analysis.memory import Training, generator_memory, trainer_memory
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.weights.architecture import read_architecture
from megatron_magistral.weights.placement import GeneratorLayout
from megatron_magistral.weights.presets import PRESETS, num_parameters
from tests.analysis.measured_memory import NUM_TOKENS, Case, Measured, measure
from tests.distributed.ranks import run_ranks
from tests.trainer.models import hf_model, save

# Attention masks of the kernels, statistics of the norms and the like are not in the formulas.
ACTIVATIONS_WITHIN = 0.15

SMALL = PRESETS["magistral-small-24b"]
GIB = 1 << 30


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    shape = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, vocab_size=1024)
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": save(hf_model("llama", **shape), folder / "dense"),
        "tied": save(hf_model("qwen2", tied=True, **shape), folder / "tied"),
        "experts": save(hf_model("qwen3_moe", **shape, **experts), folder / "experts"),
    }


LAYOUTS = {
    1: {
        "plain": ("dense", ParallelLayout(), torch.float32, False),
        "bf16": ("dense", ParallelLayout(), torch.bfloat16, False),
        "recompute": ("dense", ParallelLayout(), torch.float32, True),
        "tied": ("tied", ParallelLayout(), torch.bfloat16, False),
        "experts": ("experts", ParallelLayout(), torch.float32, False),
    },
    2: {
        "tp": ("dense", ParallelLayout(tp=2), torch.float32, False),
        "tp, whole sequence": (
            "dense",
            ParallelLayout(tp=2, sequence_parallel=False),
            torch.bfloat16,
            False,
        ),
        "pp": ("tied", ParallelLayout(pp=2), torch.float32, False),
        "vpp": ("dense", ParallelLayout(pp=2, vpp=2), torch.float32, False),
        "dp": ("dense", ParallelLayout(dp=2), torch.bfloat16, False),
        "ep": ("experts", ParallelLayout(dp=2, ep=2), torch.float32, False),
        "ep in tp": ("experts", ParallelLayout(tp=2, ep=2), torch.float32, False),
    },
}


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_formulas_agree_with_what_real_trainers_hold(models, num_ranks):
    cases = {
        name: Case(models[model], layout, dtype, recompute)
        for name, (model, layout, dtype, recompute) in LAYOUTS[num_ranks].items()
    }
    ranks = run_ranks(measure, num_ranks, list(cases.values()), timeout_s=240)
    wrong = []
    for number, (name, case) in enumerate(cases.items()):
        held = [measured[number] for measured in ranks]
        wrong += [f"{name}: {difference}" for difference in differences(case, held)]
    assert wrong == []


def differences(case: Case, ranks: list[Measured]) -> list[str]:
    training = Training(
        microbatch_tokens=NUM_TOKENS,
        num_microbatches=1,
        itemsize=case.dtype.itemsize,
        recompute=case.recompute,
        fused=False,
    )
    stages = trainer_memory(read_architecture(case.model), case.layout, training)
    per_stage = case.layout.world_size // case.layout.pp
    expected = [stages[rank // per_stage] for rank in range(case.layout.world_size)]
    pairs = list(zip(expected, ranks, strict=True))
    wrong = [
        f"{what} {getattr(e, what)}, measured {getattr(m, what)}"
        for e, m in pairs
        for what in ("weights", "gradients")
        if getattr(e, what) != getattr(m, what)
    ]
    # A rank's share of the optimizer begins and ends where Megatron's padded buffer is cut.
    owned = sum(e.optimizer for e in expected), sum(m.optimizer for m in ranks)
    if abs(owned[0] - owned[1]) > 16 * len(ranks):
        wrong.append(f"optimizer {owned[0]}, measured {owned[1]}")
    for e, m in pairs:
        largest = e.activations
        if case.recompute:  # nothing was computed again by the end of the forward pass
            largest -= trainer_layer(case, training)
        if abs(largest / m.activations - 1) > ACTIVATIONS_WITHIN:
            wrong.append(f"activations {largest}, measured {m.activations}")
    return wrong


def trainer_layer(case: Case, training: Training) -> int:
    """What one layer keeps when nothing is recomputed: the difference that a layer makes."""
    arch = read_architecture(case.model)
    plain = replace(training, recompute=False)
    more = replace(arch, num_layers=arch.num_layers + case.layout.pp)
    with_more = trainer_memory(more, case.layout, plain)[-1].activations
    return with_more - trainer_memory(arch, case.layout, plain)[-1].activations


def test_every_weight_has_its_place_in_some_rank():
    for name, arch in PRESETS.items():
        layout = ParallelLayout(tp=8, pp=4, dp=8, ep=8 if arch.experts else 1)
        training = Training(microbatch_tokens=1, num_microbatches=1)
        stages = trainer_memory(arch, layout, training)
        held = sum(stage.weights for stage in stages) / 2 * layout.tp
        if arch.experts is None:
            # Norms are whole on every tensor-parallel rank, and nothing else is.
            norms = (2 * arch.num_layers + 1) * arch.hidden_size
            assert held == num_parameters(arch) + (layout.tp - 1) * norms, name
        # Masters and moments are divided further, so that no byte of them is held twice.
        owned = sum(stage.optimizer for stage in stages) / 12 * layout.tp * layout.dp
        assert owned == pytest.approx(num_parameters(arch), rel=0.01), name


def test_the_distributed_optimizer_is_what_data_parallelism_saves():
    training = Training(microbatch_tokens=1024, num_microbatches=1)
    one, many = (trainer_memory(SMALL, ParallelLayout(tp=8, dp=dp), training)[0] for dp in (1, 16))
    assert many.optimizer == pytest.approx(one.optimizer / 16, rel=1e-6)
    assert (many.weights, many.gradients) == (one.weights, one.gradients)


def test_the_first_stage_of_a_pipeline_keeps_most_microbatches():
    training = Training(microbatch_tokens=1024, num_microbatches=64)
    stages = trainer_memory(SMALL, ParallelLayout(tp=8, pp=4), training)
    first, last = stages[0].activations, stages[-1].activations
    assert first == pytest.approx(4 * last, rel=0.02)
    few = trainer_memory(SMALL, ParallelLayout(tp=8, pp=4), replace(training, num_microbatches=2))
    assert few[0].activations == first / 2
    interleaved = trainer_memory(SMALL, ParallelLayout(tp=8, pp=4, vpp=2), training)
    assert first < interleaved[0].activations < 2 * first


def test_recomputation_keeps_an_input_a_layer_and_one_layer():
    plain = Training(microbatch_tokens=8192, num_microbatches=1)
    layout = ParallelLayout(tp=8)
    full = trainer_memory(SMALL, layout, plain)[0]
    saved = trainer_memory(SMALL, layout, replace(plain, recompute=True))[0]
    inputs = 40 * 8192 / 8 * 5120 * 2
    last_norm = 8192 / 8 * 5120 * 2
    assert saved.activations == inputs + (full.activations - last_norm) / 40 + last_norm


def test_logits_take_chunks_and_not_the_whole_batch():
    rows = [
        trainer_memory(
            SMALL, ParallelLayout(tp=8), Training(microbatch_tokens=tokens, num_microbatches=1)
        )[0].head
        for tokens in (32_768, 65_536)
    ]
    assert rows[1] - rows[0] == 3 * 32_768 * 5120 * 2  # rows of hidden states alone
    assert rows[0] < 65_536 * 131_072 * 4 / 8


@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 8), (4, 2), (8, 1)])
def test_a_token_in_the_cache_is_a_key_and_a_value_a_layer(tp, kv_heads):
    memory = generator_memory(SMALL, GeneratorLayout(tp=tp))
    assert memory.kv_token == 2 * 40 * kv_heads * 128 * 2
    assert memory.weights == pytest.approx(num_parameters(SMALL) * 2 / tp, rel=0.01)
    room = memory.weights + 10 * memory.kv_token
    assert memory.kv_tokens(room) == 10
    assert memory.kv_tokens(memory.weights / 2) == 0


def test_kv_heads_that_ranks_outnumber_are_whole_on_each():
    narrow = replace(SMALL, num_kv_heads=2)
    four, eight = (generator_memory(narrow, GeneratorLayout(tp=tp)).kv_token for tp in (4, 8))
    assert four == eight
