"""Where a model's own loader puts tensors, observed on models that load in different ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from megatron_magistral.rollout.sglang_answers import RankAnswers
from megatron_magistral.rollout.sglang_weights import View, digests, observe_loading
from megatron_magistral.weights.checksum import digest

Load = Callable[["Model", str, Tensor], None]


class Model(nn.Module):
    """One rank of two: the upper half of `rows`, fused with `fused`, and padding below."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.norm = nn.Parameter(torch.randn(3))
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._load(self, name, tensor)


def fuse(model: Model, name: str, tensor: Tensor) -> None:
    match name:
        case "rows":
            model.weight.data.narrow(0, 0, 2).copy_(tensor.narrow(0, 2, 2))
        case "fused":
            model.weight.data[2:4].copy_(tensor)
            model.weight.data[4:].fill_(0)
        case "norm":
            if tensor.shape != model.norm.shape:
                raise ValueError(f"{list(tensor.shape)} is not 3")
            model.norm.data.copy_(tensor)


def spec(name: str, *shape: int) -> dict:
    return {"name": name, "shape": shape, "dtype": "float32"}


SPECS = [spec("rows", 4, 3), spec("fused", 2, 3), spec("norm", 3)]


def test_observing_changes_nothing_and_finds_every_element() -> None:
    model = Model(fuse)
    before = {name: p.clone() for name, p in model.named_parameters()}
    placement = observe_loading(model, SPECS)
    assert placement.unfilled == placement.refused == {}
    (copy,) = placement.copies["rows"]
    assert copy.source == View((2, 3), (3, 1), offset=6)
    assert copy.target == View((2, 3), (3, 1), offset=0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_digests_are_of_what_was_really_loaded() -> None:
    model = Model(fuse)
    placement = observe_loading(model, SPECS)
    tensors = {s["name"]: torch.randn(s["shape"]) for s in SPECS}
    model.load_weights(tensors.items())
    expected = {"rows": tensors["rows"][2:], "fused": tensors["fused"], "norm": tensors["norm"]}
    for name, values in digests(model, placement, list(expected)).items():
        assert values == [int(digest(expected[name]))]


def test_missing_extra_and_misshapen_tensors_are_told_apart() -> None:
    placement = observe_loading(Model(fuse), [SPECS[0], spec("stranger", 2), spec("norm", 4)])
    assert placement.copies["stranger"] == []
    assert placement.refused == {"norm": "ValueError: [4] is not 3"}
    assert placement.unfilled == {"weight": 9, "norm": 3}


def test_a_tensor_that_is_converted_on_its_way_is_refused() -> None:
    def scale(model: Model, name: str, tensor: Tensor) -> None:
        model.norm.data.copy_(tensor * 2)

    placement = observe_loading(Model(scale), [spec("norm", 3)])
    assert "norm gets a computed value" in placement.refused["norm"]


def test_a_digest_needs_a_placement_first() -> None:
    with pytest.raises(ValueError, match="needs a manifest"):
        RankAnswers(0).answer(Model(fuse), {"digest": ["norm"], "heads": []})


def test_a_question_that_nobody_knows_is_named() -> None:
    with pytest.raises(ValueError, match="no such question: what"):
        RankAnswers(0).answer(Model(fuse), {"what": 1})
