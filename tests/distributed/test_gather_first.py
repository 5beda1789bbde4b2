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
