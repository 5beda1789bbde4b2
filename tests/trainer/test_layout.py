"""Which layouts fit a model."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_magistral.trainer.layout import LayoutError, ParallelLayout, check_layout
from megatron_magistral.weights.architecture import architecture_of
from tests.trainer.models import hf_model

ARCH = architecture_of(hf_model("llama").config)  # 8 heads, 4 kv heads, 4 layers, 131 tokens


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


def test_every_rank_needs_a_row_of_the_vocabulary() -> None:
    tiny = dataclasses.replace(ARCH, vocab_size=5)
    with pytest.raises(LayoutError, match="tp = 4 is too large for a vocabulary of 5"):
        check_layout(tiny, ParallelLayout(tp=4))


def test_world_size_and_token_multiple_follow_from_the_layout() -> None:
    assert ParallelLayout(tp=2, pp=3, dp=4).world_size == 24
    assert ParallelLayout(tp=2).token_multiple == 2
    assert ParallelLayout(tp=2, sequence_parallel=False).token_multiple == 1
    assert ParallelLayout(pp=2).token_multiple == 1
