"""Which layouts fit a model."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_magistral.config_parallel import ParallelConfig
from megatron_magistral.trainer.layout import LayoutError, ParallelLayout, check_layout
from megatron_magistral.weights.architecture import architecture_of
from tests.trainer.models import hf_model

ARCH = architecture_of(hf_model("llama").config)  # 8 heads, 4 kv heads, 4 layers, 131 tokens
EXPERTS = architecture_of(hf_model("qwen2_moe").config)  # 4 experts of 48 columns, a shared one


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(tp=4, pp=2, vpp=2, dp=3), ParallelLayout(pp=4)]
)
def test_a_layout_that_divides_the_model_is_accepted(layout: ParallelLayout) -> None:
    check_layout(ARCH, layout)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (ParallelLayout(tp=3), "tp = 3 must divide the model's 8 attention heads"),
        (ParallelLayout(tp=8), "tp = 8 must divide the model's 4 key/value heads"),
        (ParallelLayout(pp=3), "pp x vpp = 3 must divide the model's 4 layers"),
        (ParallelLayout(vpp=2), "vpp = 2 needs pp > 1"),
    ],
)
def test_one_that_does_not_is_refused_by_name(layout: ParallelLayout, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        check_layout(ARCH, layout)


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(tp=4), ParallelLayout(tp=2, dp=2, ep=4), ParallelLayout(tp=4, pp=2, ep=2)],
)
def test_experts_fit_a_layout_that_divides_them_or_their_number(layout: ParallelLayout) -> None:
    check_layout(EXPERTS, layout)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (ParallelLayout(dp=3, ep=3), "ep = 3 must divide the model's 4 experts"),
        (ParallelLayout(dp=3, ep=2), "ep x etp = 2 must divide the tp x dp = 3 ranks of a stage"),
        (ParallelLayout(tp=2, sequence_parallel=False), "tp = 2 needs sequence parallelism"),
    ],
)
def test_a_layout_that_does_not_fit_experts_is_refused_by_name(
    layout: ParallelLayout, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        check_layout(EXPERTS, layout)


def test_a_dense_model_has_no_experts_to_spread() -> None:
    with pytest.raises(LayoutError, match="ep = 2 must be 1: the model has no experts"):
        check_layout(ARCH, ParallelLayout(dp=2, ep=2))


def test_experts_are_divided_only_where_they_are_not_spread() -> None:
    assert ParallelLayout(tp=4).etp == 4
    assert ParallelLayout(tp=4, ep=2).etp == 1


def test_a_layout_follows_from_the_config() -> None:
    parallel = ParallelConfig(
        tensor=2, pipeline=3, data=4, virtual_pipeline=5, expert=8, sequence=False
    )
    expected = ParallelLayout(tp=2, pp=3, dp=4, vpp=5, ep=8, sequence_parallel=False)
    assert ParallelLayout.of(parallel) == expected


def test_every_rank_needs_a_row_of_the_vocabulary() -> None:
    tiny = dataclasses.replace(ARCH, vocab_size=5)
    with pytest.raises(LayoutError, match="tp = 4 is too large for a vocabulary of 5"):
        check_layout(tiny, ParallelLayout(tp=4))


def test_world_size_and_token_multiple_follow_from_the_layout() -> None:
    assert ParallelLayout(tp=2, pp=3, dp=4).world_size == 24
    assert ParallelLayout(tp=2).token_multiple == 2
    assert ParallelLayout(tp=2, sequence_parallel=False).token_multiple == 1
    assert ParallelLayout(pp=2).token_multiple == 1
