"""What the weights of an SGLang model are made of, read inside SGLang's own processes.

Where a Hugging Face tensor ends up (fused into which parameter, cut for which tensor-parallel
rank, padded how) is decided by the model's `load_weights` and by nothing else, and differs from
version to version. So it is not computed here but observed: `load_weights` is run on tensors
without data, every write to a parameter is recorded instead of made, and source and target of
each recorded copy say which elements this rank holds where.

No import of SGLang: everything that is needed comes from the model object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_magistral.weights.checksum import digest, head
from megatron_magistral.weights.parts import View


@dataclass(frozen=True)
class Copy:
    """One write of loading: `source` of a Hugging Face tensor to `target` of a parameter."""

    parameter: str
    dtype: str
    source: View
    target: View


@dataclass
class Placement:
    """What loading the tensors of a manifest would do on this rank.

    `copies` by Hugging Face name; a name without copies is one that the model does not know.
    `refused` says why a tensor cannot be loaded. `unfilled` are parameters, with the number of
    their elements that nothing writes. `linked` ones get what another parameter holds.
    """

    copies: dict[str, list[Copy]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unfilled: dict[str, int] = field(default_factory=dict)
    linked: list[str] = field(default_factory=list)


def observe_loading(model: Any, specs: Sequence[Mapping[str, Any]]) -> Placement:
    """Run `model.load_weights` on each of `specs` (name, shape, dtype); nothing is changed."""
    placement = Placement()
    writes = _Writes(dict(model.named_parameters()))
    for spec in specs:
        name = spec["name"]
        empty = torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]), device="meta")
        writes.begin(empty)
        try:
            with torch.no_grad(), writes:
                model.load_weights([(name, empty)])
        except Exception as error:
            # A worker's edge: whatever a loader dislikes about a tensor is for the trainer to read.
            placement.refused[name] = f"{type(error).__name__}: {error}"
        placement.copies[name] = writes.copies
    placement.unfilled = writes.unfilled()
    placement.linked = sorted(writes.linked)
    return placement


def digests(
    model: Any, placement: Placement, names: Sequence[str], heads: Sequence[str] = ()
) -> dict[str, list[int]]:
    """The digest of what every copy of each of `names` left in its parameter, of `heads` only of
    its head."""
    parameters = dict(model.named_parameters())

    def targets(name: str) -> list[Tensor]:
        return [target_of(parameters, copy) for copy in placement.copies[name]]

    found = {name: [digest(target) for target in targets(name)] for name in names}
    found |= {name: [digest(head(target)) for target in targets(name)] for name in heads}
    return {name: [int(value) for value in values] for name, values in found.items()}


def target_of(parameters: Mapping[str, Tensor], copy: Copy) -> Tensor:
    """The elements of a parameter that `copy` writes."""
    target = copy.target
    parameter = parameters[copy.parameter].detach()
    return parameter.as_strided(target.size, target.stride, target.offset)


class _Writes(TorchDispatchMode):
    """Records writes to parameters in place of making them; everything else happens."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = parameters
        self._name_of = {p.untyped_storage()._cdata: name for name, p in parameters.items()}
        self._num_written = dict.fromkeys(parameters, 0)
        self._source: Tensor | None = None
        self.copies: list[Copy] = []
        self.linked: set[str] = set()

    def begin(self, source: Tensor) -> None:
        """From now on, copies from `source` count."""
        self._source = source
        self.copies = []

    def unfilled(self) -> dict[str, int]:
        return {
            name: parameter.numel() - self._num_written[name]
            for name, parameter in self._parameters.items()
            if self._num_written[name] < parameter.numel()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if target is None or not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        name = self._name_of.get(target.untyped_storage()._cdata)
        if name is None:
            return func(*args, **(kwargs or {}))
        self._num_written[name] += target.numel()
        if func is torch.ops.aten.copy_.default:
            self._record(name, target, args[1])
        return target  # a fill is padding: written, but not from the tensor

    def _record(self, name: str, target: Tensor, source: Tensor) -> None:
        assert self._source is not None
        if source.untyped_storage()._cdata != self._source.untyped_storage()._cdata:
            if source.is_meta:
                raise ValueError(f"{name} gets a computed value, which cannot be followed")
            self.linked.add(name)  # from one parameter to another, as for tied embeddings
            return
        if source.shape != target.shape:
            raise ValueError(f"{list(source.shape)} into {list(target.shape)} of {name}")
        dtype = str(target.dtype).removeprefix("torch.")
        self.copies.append(Copy(name, dtype, View.of(source), View.of(target)))
