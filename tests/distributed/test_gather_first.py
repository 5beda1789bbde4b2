"""What is gathered to be sent: each stage's leader gets the plan's buckets of it, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.broadcast.groups import make_mesh
from benchmarks.broadcast.results import Options
from megatron_magistral.weights.gather import Mesh, Reach, gather_hf
from megatron_magistral.weights.names import parameters, shard
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout, tensors
from megatron_magistral.weights.plan import gather_plan
from tests.distributed.ranks import run_ranks
from tests.weights.test_plan import architecture, hf_tensors

pytestmark = pytest.mark.distributed

# 131 rows of vocabulary: the last tensor-parallel rank has padding rows, of four ranks all it has.
ARCH = architecture(num_layers=4, vocab_size=131, qkv_bias=True)
LAYOUTS = [
    TrainerLayout(tp=4),
    TrainerLayout(tp=2, pp=2),
    TrainerLayout(tp=2, pp=2, vpp=2),
    TrainerLayout(pp=4),
    TrainerLayout(tp=2, dp=2),
    TrainerLayout(pp=2, dp=2),
]
BUCKET_BYTES = 1500
DTYPE = torch.bfloat16  # the shards are float32


def _shards(mesh: Mesh, layout: TrainerLayout) -> dict[str, torch.Tensor]:
    whole = {name: t.float() for name, t in hf_tensors(ARCH).items()}
    stage_of = {t.name: t.stage for t in tensors(ARCH, layout)}
    return {
        name: shard(p, [whole[s] for s in p.sources], mesh.tp_rank, mesh.tp_size)
        for name, p in parameters(ARCH).items()
        if p.is_copy or stage_of[p.sources[0]] == mesh.pp_rank
    }


def _gather() -> list[list[list[tuple[str, torch.Tensor]]]]:
    """By layout: what this rank has, copied, since a buffer is used again."""
    dist.init_process_group("gloo")
    found = []
    for layout in LAYOUTS:
        mesh = make_mesh(Options(ARCH, layout, GeneratorLayout(), BUCKET_BYTES))
        assert mesh is not None
        buckets = gather_hf(
            *(_shards(mesh, layout), parameters(ARCH), mesh, BUCKET_BYTES, DTYPE),
            reach=Reach.LEADERS,
        )
        found.append([[(n, t.clone()) for n, t in bucket if not t.is_meta] for bucket in buckets])
    dist.destroy_process_group()
    return found


def test_the_leaders_get_the_buckets_of_the_plan_bit_for_bit() -> None:
    found = run_ranks(_gather, 4)
    expected = {name: t.float().to(DTYPE) for name, t in hf_tensors(ARCH).items()}
    for number, layout in enumerate(LAYOUTS):
        plan = gather_plan(ARCH, layout, GeneratorLayout(), bucket_bytes=BUCKET_BYTES)
        names = [[plan.tensors[p.tensor].name for p in b.pieces] for b in plan.buckets]
        # A rank that does not lead its stage has none, or empty ones; the plan is by stages.
        buckets = [bucket for rank in found for bucket in rank[number] if bucket]
        assert [[name for name, _ in bucket] for bucket in buckets] == names, layout
        for bucket in buckets:
            assert all(torch.equal(t, expected[name]) for name, t in bucket), layout


def _lend() -> list[tuple[list[list[tuple[str, torch.Tensor]]], set[str]]]:
    """By layout: what this rank has of tensors that are sent as they are held, copied; and the
    names of those that lie in its shards."""
    dist.init_process_group("gloo")
    found = []
    for layout in LAYOUTS:
        mesh = make_mesh(Options(ARCH, layout, GeneratorLayout(), BUCKET_BYTES))
        assert mesh is not None
        shards = _shards(mesh, layout)
        memory = {shard.untyped_storage().data_ptr() for shard in shards.values()}
        buckets, lent = [], set()
        for bucket in gather_hf(
            *(shards, parameters(ARCH), mesh, BUCKET_BYTES, torch.float32),
            reach=Reach.LEADERS,
            lends=True,
        ):
            held = [(name, tensor) for name, tensor in bucket if not tensor.is_meta]
            buckets.append([(name, tensor.clone()) for name, tensor in held])
            lent |= {n for n, t in held if t.untyped_storage().data_ptr() in memory}
        found.append((buckets, lent))
    dist.destroy_process_group()
    return found


def test_what_a_leader_holds_whole_is_lent_and_all_of_it_is_right() -> None:
    found = run_ranks(_lend, 4)
    whole = {name: t.float() for name, t in hf_tensors(ARCH).items()}
    for number, layout in enumerate(LAYOUTS):
        tensors_of = [t for rank in found for bucket in rank[number][0] for t in bucket]
        assert sorted(name for name, _ in tensors_of) == sorted(whole), layout
        assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors_of), layout
        lent = {name for rank in found for name in rank[number][1]}
        copied = {name.rsplit(".", 2)[1] for name in whole if name not in lent}
        if layout.tp == 1:  # all but the parts of the fused parameter whose rows are interleaved
            assert copied == {"q_proj", "k_proj", "v_proj"}
        else:
            assert all(whole[name].dim() == 1 for name in lent)
