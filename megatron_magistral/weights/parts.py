"""What one generator rank holds of the tensors of a bucket, cut into runs for the wire.

A generator rank's part of a tensor is what its copies of it read: one or more views. Both ends cut
alike, from what both know: a large view is a run by itself, so that it can be received where it
belongs; small ones share runs, because an operation costs more than they do: over gloo about
0.4 ms of a core at either end, which is what 1 to 2 MiB cost to copy in and out.

It needs nothing but torch: SGLang's own processes use it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGE_BYTES = 1 << 20
RUN_BYTES = 8 << 20
"""Of small views in a run, at most."""


@dataclass(frozen=True)
class View:
    """Elements of a contiguous tensor, as in `torch.as_strided`; counted in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> View:
        return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def num_elements(self) -> int:
        return torch.Size(self.size).numel()

    def into(self, tensor: Tensor) -> Tensor:
        """These elements of `tensor`, which is contiguous but may begin within its storage."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Part:
    """`view` of the tensor `name`, on the wire."""

    name: str
    view: View
    num_bytes: int


def parts_of(name: str, views: Sequence[View], itemsize: int) -> list[Part]:
    """Each view once, however many copies read it."""
    return [Part(name, view, view.num_elements * itemsize) for view in dict.fromkeys(views)]


def runs(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts that travel together: first the small ones, in order, then each large one."""
    large: list[Part] = []
    run: list[Part] = []
    num_bytes = 0
    for part in parts:
        if part.num_bytes >= LARGE_BYTES:
            large.append(part)
            continue
        if num_bytes + part.num_bytes > RUN_BYTES:
            yield run
            run, num_bytes = [], 0
        run.append(part)
        num_bytes += part.num_bytes
    if run:
        yield run
    yield from ([part] for part in large)


def pack(tensors: Sequence[Tensor], data: Tensor) -> None:
    """Copies `tensors` behind each other into `data` [bytes], which they fill."""
    for place, tensor in zip(data.split([t.nbytes for t in tensors]), tensors, strict=True):
        if _is_aligned(place, tensor):
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        else:
            place.copy_(tensor.contiguous().view(-1).view(torch.uint8))


def unpack(data: Tensor, targets: Sequence[Tensor]) -> None:
    """Copies the bytes of `data` [bytes] to `targets`, which take them all."""
    for part, target in zip(data.split([t.nbytes for t in targets]), targets, strict=True):
        aligned = part if _is_aligned(part, target) else part.clone()
        target.copy_(aligned.view(target.dtype).view(target.shape))


def _is_aligned(data: Tensor, like: Tensor) -> bool:
    """Whether torch can view these bytes as the dtype of `like`."""
    return data.storage_offset() % like.element_size() == 0
