"""Plans carried out on whole tensors in memory: what arrives is what an engine expects."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_magistral.trainer.layout import LayoutError
from megatron_magistral.weights.architecture import Architecture, Experts, Family
from megatron_magistral.weights.names import hf_shapes, local_parts, parameters, shard, unshard
from megatron_magistral.weights.placement import (
    GeneratorLayout,
    Range,
    TrainerLayout,
    held,
    needed,
)
from megatron_magistral.weights.plan import PLANS, Plan, direct_plan, gather_plan
from megatron_magistral.weights.settings import PlanKind

SIZES = st.sampled_from([1, 2, 4])
ITEMSIZE = 4


@dataclass(frozen=True)
class Case:
    arch: Architecture
    trainer: TrainerLayout
    generator: GeneratorLayout
    bucket_bytes: int

    def plan(self, kind: PlanKind) -> Plan:
        return PLANS[kind](
            self.arch,
            self.trainer,
            self.generator,
            bucket_bytes=self.bucket_bytes,
            itemsize=ITEMSIZE,
        )


def architecture(**changes: object) -> Architecture:
    values: dict[str, object] = dict(
        family=Family.QWEN3,
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=16,
        num_heads=8,
        num_kv_heads=4,
        head_dim=2,
        vocab_size=131,
        max_position_embeddings=64,
        norm_eps=1e-5,
        qkv_bias=False,
        qk_norm=True,
        tied_embeddings=False,
        windows=(),
        rope_inv_freq=(),
        rope_attention_factor=1.0,
    )
    return Architecture(**(values | changes))  # type: ignore[arg-type]


def _experts(num: int) -> Experts:
    return Experts(num, ffn_hidden_size=8, top_k=2, normalises_scores=True)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any layouts on both sides, and a small model that they can divide."""
    has_experts = draw(st.booleans())
    tp, pp, vpp = draw(SIZES), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    ep = draw(SIZES) if has_experts else 1
    # The ranks of a stage are shared by dense copies and by experts: both must divide them.
    dp = draw(st.sampled_from([1, 2])) * max(1, ep // tp)
    vpp = vpp if pp > 1 else 1
    engine_tp = draw(st.sampled_from([1, 2, 4, 8]))
    engine_ep = draw(st.sampled_from([e for e in (1, 2, 4) if engine_tp % e == 0]))
    kv_heads = tp * draw(st.sampled_from([1, 2]))
    arch = architecture(
        family=Family.QWEN3_MOE if has_experts else Family.QWEN3,
        experts=_experts(4 * draw(st.sampled_from([1, 2]))) if has_experts else None,
        num_layers=pp * vpp,
        num_kv_heads=kv_heads,
        num_heads=max(8, kv_heads),
        vocab_size=draw(st.integers(24, 200)),
        qkv_bias=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )
    return Case(
        arch,
        TrainerLayout(tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep),
        GeneratorLayout(
            replicas=draw(st.integers(1, 5)), tp=engine_tp, ep=engine_ep if has_experts else 1
        ),
        draw(st.sampled_from([64, 1000, 5000, 1 << 20])),
    )


def hf_tensors(arch: Architecture) -> dict[str, Tensor]:
    """Every element of the model another number."""
    first = 0
    tensors = {}
    for name, shape in hf_shapes(arch).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count).view(shape)
        first += count
    return tensors


def trainer_memory(case: Case, tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """What each trainer rank holds of each Hugging Face tensor, out of its Megatron shards."""
    layout, memory = case.trainer, defaultdict(dict)
    stage_of = {t.name: t.stage for t in case.plan(PlanKind.GATHER).tensors}
    for param in parameters(case.arch).values():
        if param.is_copy:
            continue
        sources = [tensors[name] for name in param.sources]
        stage = stage_of[param.sources[0]]
        if param.expert is None:
            ranks = [
                (layout.dense_rank(stage, tp, copy), tp, layout.tp)
                for tp in range(layout.tp)
                for copy in range(layout.dp)
            ]
        else:
            assert case.arch.experts is not None
            owner = param.expert // (case.arch.experts.num // layout.ep)
            ranks = [
                (layout.expert_rank(stage, owner, etp, copy), etp, layout.etp)
                for etp in range(layout.etp)
                for copy in range(layout.expert_copies)
            ]
        for rank, part, parts in ranks:
            local = local_parts(param, shard(param, sources, part, parts), parts)
            memory[rank] |= dict(zip(param.sources, local, strict=True))
    return memory


def deliver(case: Case, plan: Plan) -> dict[int, dict[str, list[tuple[Range, Tensor]]]]:
    """Carry out a plan: what each generator rank receives of each tensor."""
    tensors = hf_tensors(case.arch)
    memory = trainer_memory(case, tensors)
    received: dict[int, dict[str, list[tuple[Range, Tensor]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for transfer in plan.transfers():
        for piece in plan.buckets[transfer.bucket].pieces:
            tensor = plan.tensors[piece.tensor]
            if plan.kind is PlanKind.GATHER:
                payload = tensors[tensor.name]
            else:
                payload = memory[transfer.source][tensor.name]
            if tensor.axis is not None:
                start = piece.range.start
                if plan.kind is PlanKind.DIRECT:
                    parts = case.trainer.tp if tensor.expert is None else case.trainer.etp
                    start -= next(
                        held(tensor, case.trainer, part).start
                        for part in range(parts)
                        if len(held(tensor, case.trainer, part) & piece.range)
                    )
                payload = payload.narrow(tensor.axis, start, len(piece.range))
            for target in transfer.targets:
                received[target][tensor.name].append((piece.range, payload))
    return received


def engine_shard(case: Case, name: str, full: Tensor, tp_rank: int) -> Tensor | None:
    """What SGLang's loaders keep of a tensor, told by heads, halves and experts."""
    arch, tp = case.arch, case.generator.tp
    parts, part = tp, tp_rank
    if ".experts." in name:
        assert arch.experts is not None
        expert = int(name.split(".experts.")[1].split(".")[0])
        parts = tp // case.generator.ep
        if expert // (arch.experts.num // case.generator.ep) != tp_rank // parts:
            return None
        part = tp_rank % parts
    kind = name.rsplit(".", 2)[-2]
    match kind:
        case "q_proj":
            heads = arch.num_heads // tp
            return full.view(arch.num_heads, arch.head_dim, -1)[part * heads :][:heads]
        case "k_proj" | "v_proj":
            # The kv heads that the rank's queries attend with.
            queries = range(part * arch.num_heads // tp, (part + 1) * arch.num_heads // tp)
            wanted = sorted({q * arch.num_kv_heads // arch.num_heads for q in queries})
            return full.view(arch.num_kv_heads, arch.head_dim, -1)[wanted]
        case "gate_proj" | "up_proj":
            return full.chunk(parts)[part]
        case "o_proj" | "down_proj":
            return full.chunk(parts, dim=1)[part]
        case "embed_tokens" | "lm_head":
            rows = -(-len(full) // 64) * 64
            rows = rows if rows % tp == 0 else -(-len(full) // (64 * tp)) * 64 * tp
            padded = torch.cat([full, full.new_full((rows - len(full), full.shape[1]), -1)])
            mine = padded.chunk(tp)[part]
            return mine[mine[:, 0] >= 0]
    return full


@settings(max_examples=60, deadline=None)
@given(case=cases(), kind=st.sampled_from(PlanKind))
def test_each_generator_rank_receives_its_shards_and_each_byte_of_them_once(
    case: Case, kind: PlanKind
) -> None:
    plan = case.plan(kind)
    received = deliver(case, plan)
    by_name = {t.name: t for t in plan.tensors}
    for name, full in hf_tensors(case.arch).items():
        tensor = by_name[name]
        for rank in range(case.generator.world_size):
            tp_rank = rank % case.generator.tp
            arrived = torch.cat(
                [t.flatten() for _, t in received[rank].get(name, [])] or [full.new_empty(0)]
            )
            assert len(arrived.unique()) == len(arrived), "a byte arrived twice"
            expected = engine_shard(case, name, full, tp_rank)
            wanted = full.new_empty(0) if expected is None else expected.flatten().sort().values
            if kind is PlanKind.DIRECT:
                assert torch.equal(arrived.sort().values, wanted)
            else:
                assert torch.equal(arrived, full.flatten())
            if expected is not None and len(wanted):
                mine = needed(tensor, case.generator, case.arch, tp_rank)
                axis = tensor.axis or 0
                size = full.shape[axis] if tensor.axis is None else len(mine)
                kept = full.narrow(axis, mine.start, size)
                assert torch.equal(kept.flatten(), expected.flatten())


@settings(max_examples=60, deadline=None)
@given(case=cases(), kind=st.sampled_from(PlanKind))
def test_a_bucket_is_over_its_size_only_if_one_piece_is(case: Case, kind: PlanKind) -> None:
    for bucket in case.plan(kind).buckets:
        assert bucket.pieces and bucket.num_bytes > 0
        assert bucket.num_bytes <= case.bucket_bytes or len(bucket.pieces) == 1


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_each_tensor_is_in_one_bucket_of_the_gather_plan_and_of_its_stage(case: Case) -> None:
    plan = case.plan(PlanKind.GATHER)
    sent = [piece.tensor for bucket in plan.buckets for piece in bucket.pieces]
    assert sent == list(range(len(plan.tensors)))
    assert {t.name for t in plan.tensors} == set(hf_shapes(case.arch))
    for bucket in plan.buckets:
        assert {plan.tensors[piece.tensor].stage for piece in bucket.pieces} == {bucket.stage}


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_the_direct_plan_sends_only_from_ranks_that_hold_and_shares_the_work(case: Case) -> None:
    plan = case.plan(PlanKind.DIRECT)
    routes = defaultdict(list)
    for transfer in plan.transfers():
        assert 0 <= transfer.source < case.trainer.world_size
        routes[transfer.bucket].append(transfer)
    for number, transfers in routes.items():
        is_expert = plan.tensors[plan.buckets[number].pieces[0].tensor].expert is not None
        copies = case.trainer.expert_copies if is_expert else case.trainer.dense_copies
        assert len({t.source for t in transfers}) == min(copies, case.generator.replicas)


@given(case=cases(), kind=st.sampled_from(PlanKind))
@settings(max_examples=20, deadline=None)
def test_every_rank_computes_the_same_plan(case: Case, kind: PlanKind) -> None:
    assert case.plan(kind) == case.plan(kind)


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_local_parts_of_all_ranks_follow_each_other(case: Case) -> None:
    tensors = hf_tensors(case.arch)
    for param in parameters(case.arch).values():
        parts = case.trainer.tp if param.expert is None else case.trainer.etp
        sources = [tensors[name] for name in param.sources]
        shards = [shard(param, sources, part, parts) for part in range(parts)]
        for (name, whole), source in zip(unshard(param, shards), sources, strict=True):
            assert torch.equal(whole, source), name


@pytest.mark.parametrize(
    ("trainer", "generator", "words"),
    [
        (TrainerLayout(tp=3), GeneratorLayout(), "tp = 3 must divide the model's 8 attention"),
        (TrainerLayout(ep=3, dp=3), GeneratorLayout(), "ep = 3 must divide the model's 4 experts"),
        (TrainerLayout(ep=4), GeneratorLayout(), "ep x etp = 4 must divide the tp x dp = 1 ranks"),
        (TrainerLayout(), GeneratorLayout(tp=3), "generator tp = 3 and the 4 key/value heads"),
        (TrainerLayout(), GeneratorLayout(tp=2, ep=4), "generator ep = 4 must divide the 2 ranks"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_name(
    trainer: TrainerLayout, generator: GeneratorLayout, words: str
) -> None:
    arch = architecture(family=Family.QWEN3_MOE, experts=_experts(4))
    for make in (gather_plan, direct_plan):
        with pytest.raises(LayoutError, match=words):
            make(arch, trainer, generator)
