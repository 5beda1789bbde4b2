"""What ranks gather is what the plan says, in its buckets."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_magistral.weights.gather import GatherSeconds, Mesh, gather_hf
from megatron_magistral.weights.names import parameters, shard
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout, tensors
from megatron_magistral.weights.plan import gather_plan
from tests.distributed.ranks import run_ranks
from tests.weights.test_plan import architecture, hf_tensors

pytestmark = pytest.mark.distributed

ARCH = architecture(num_layers=4, vocab_size=131, qkv_bias=True, tied_embeddings=True)
LAYOUTS = [TrainerLayout(tp=2), TrainerLayout(pp=2), TrainerLayout(pp=2, vpp=2)]
BUCKET_BYTES = 1500


def _mesh(layout: TrainerLayout) -> Mesh:
    rank, everyone = dist.get_rank(), list(range(dist.get_world_size()))
    alone = [dist.new_group([r]) for r in everyone][rank]
    all_ranks = dist.new_group(everyone)
    tp_group, pp_group = (all_ranks, alone) if layout.tp > 1 else (alone, all_ranks)
    tp_rank, pp_rank = (rank, 0) if layout.tp > 1 else (0, rank)
    return Mesh(tp_rank, layout.tp, pp_rank, layout.pp, 0, 1, tp_group, pp_group, alone)


def _gather() -> list[tuple[list[list[str]], bool, bool]]:
    """Per layout: names by bucket; whether all is right; whether a bucket is one run of bytes."""
    dist.init_process_group("gloo")
    expected = {name: t.float() for name, t in hf_tensors(ARCH).items()}
    found = []
    for layout in LAYOUTS:
        mesh = _mesh(layout)
        stage_of = {t.name: t.stage for t in tensors(ARCH, layout)}
        params = parameters(ARCH)
        local = {
            name: shard(p, [expected[s] for s in p.sources], mesh.tp_rank, mesh.tp_size)
            for name, p in params.items()
            if p.is_copy or stage_of[p.sources[0]] == mesh.pp_rank
        }
        seconds = GatherSeconds()
        buckets = list(gather_hf(local, params, mesh, BUCKET_BYTES, torch.float32, seconds))
        is_right = all(torch.equal(t, expected[name]) for bucket in buckets for name, t in bucket)
        is_one = all(
            second.data_ptr() == first.data_ptr() + first.nbytes
            for bucket in buckets
            for (_, first), (_, second) in itertools.pairwise(bucket)
        )
        found.append(([[name for name, _ in b] for b in buckets], is_right, is_one))
        assert seconds.wire_s > 0 and seconds.convert_s > 0
    dist.destroy_process_group()
    return found


def test_every_rank_gathers_the_buckets_of_the_plan_bit_for_bit() -> None:
    results = run_ranks(_gather, 2)
    assert results[0] == results[1]
    for layout, (names, is_right, is_one) in zip(LAYOUTS, results[0], strict=True):
        plan = gather_plan(ARCH, layout, GeneratorLayout(), bucket_bytes=BUCKET_BYTES, itemsize=4)
        assert is_right and is_one
        assert names == [[plan.tensors[p.tensor].name for p in b.pieces] for b in plan.buckets]
