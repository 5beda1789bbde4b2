"""What ranks gather is what the plan says, in its buckets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.weights.architecture import Architecture, Experts, Family
from megatron_magistral.weights.gather import GatherSeconds, Mesh, gather_hf
from megatron_magistral.weights.names import parameters, shard
from megatron_magistral.weights.placement import GeneratorLayout, TrainerLayout, tensors
from megatron_magistral.weights.plan import gather_plan
from tests.distributed.ranks import run_ranks
from tests.weights.test_plan import architecture, hf_tensors

pytestmark = pytest.mark.distributed

ARCH = architecture(num_layers=4, vocab_size=131, qkv_bias=True, tied_embeddings=True)
EXPERTS = architecture(
    family=Family.QWEN2_MOE,
    num_layers=4,
    vocab_size=131,
    experts=Experts(4, 8, top_k=2, normalises_scores=True, shared_ffn_hidden_size=16),
)
CASES = [
    (ARCH, TrainerLayout(tp=2)),
    (ARCH, TrainerLayout(pp=2)),
    (ARCH, TrainerLayout(pp=2, vpp=2)),
    (EXPERTS, TrainerLayout(tp=2)),
    (EXPERTS, TrainerLayout(tp=2, ep=2)),
    (EXPERTS, TrainerLayout(dp=2, ep=2)),
]
BUCKET_BYTES = 1500


def _mesh(layout: TrainerLayout) -> Mesh:
    """Both ranks in the groups of more than one, and alone in the others."""
    rank, everyone = dist.get_rank(), list(range(dist.get_world_size()))
    alone = [dist.new_group([r]) for r in everyone][rank]
    all_ranks = dist.new_group(everyone)
    sizes = (layout.tp, layout.pp, layout.dp, layout.ep)
    ranks = [rank if size > 1 else 0 for size in sizes]
    groups = [all_ranks if size > 1 else alone for size in sizes]
    return Mesh(
        *(ranks[0], layout.tp, ranks[1], layout.pp, ranks[2], layout.dp, *groups[:3]),
        ep_rank=ranks[3],
        ep_size=layout.ep,
        ep_group=groups[3],
    )


def _local(
    arch: Architecture, layout: TrainerLayout, mesh: Mesh, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What this rank holds, by the table of placements."""
    stage_of = {t.name: t.stage for t in tensors(arch, layout)}
    experts_per_rank = arch.experts.num // layout.ep if arch.experts else 1
    return {
        name: shard(param, [weights[source] for source in param.sources], *mesh.part_of(param))
        for name, param in parameters(arch).items()
        if (param.is_copy or stage_of[param.sources[0]] == mesh.pp_rank)
        and (param.expert is None or param.expert // experts_per_rank == mesh.ep_rank)
    }


def _gather() -> list[tuple[list[list[str]], bool, bool]]:
    """Per case: names by bucket; whether all is right; whether a bucket is one run of bytes."""
    dist.init_process_group("gloo")
    found = []
    for arch, layout in CASES:
        expected = {name: t.float() for name, t in hf_tensors(arch).items()}
        mesh = _mesh(layout)
        local = _local(arch, layout, mesh, expected)
        seconds = GatherSeconds()
        buckets = list(
            gather_hf(local, parameters(arch), mesh, BUCKET_BYTES, torch.float32, seconds)
        )
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
    for (arch, layout), (names, is_right, is_one) in zip(CASES, results[0], strict=True):
        plan = gather_plan(arch, layout, GeneratorLayout(), bucket_bytes=BUCKET_BYTES, itemsize=4)
        assert is_right and is_one
        assert names == [[plan.tensors[p.tensor].name for p in b.pieces] for b in plan.buckets]
