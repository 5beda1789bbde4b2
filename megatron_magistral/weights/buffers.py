"""Memory for buckets.

On a CPU, memory that nobody has touched costs more than sending what is written to it: 0.7 ms/MiB
in pages of 4 KiB, where a copy takes 0.13 (one core of an AMD EPYC); in huge pages it is 0.12, but
3.4 in a virtual machine whose host has taken free pages back. So a buffer is kept from one update
to the next. A C library that keeps freed blocks holds several buckets where one is in use. On a
GPU, torch's own cache keeps memory, and lends it to training between updates.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


def wire_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8, of any content. On a CPU it is in huge pages, where there are any, and
    goes back to the kernel with the last view of it."""
    if device.type != "cpu" or num_bytes == 0:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


class TurnBuffers:
    """Buffers in turn; of two, one is on the wire while the other is being filled."""

    def __init__(self, num_buffers: int = 2) -> None:
        self._num_buffers = num_buffers
        self._buffers: deque[Tensor] = deque()

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[num_elements] of `dtype`, of any content: what was given out longest ago."""
        num_bytes = num_elements * dtype.itemsize
        buffer = self._buffers.popleft() if len(self._buffers) == self._num_buffers else None
        if buffer is None or len(buffer) < num_bytes:
            del buffer  # before there is another one
            buffer = wire_buffer(num_bytes, device)
        self._buffers.append(buffer)
        return buffer[:num_bytes].view(dtype)

    def take_each(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """One [size] of `dtype` for each of `sizes`, behind each other; for none, no buffer."""
        return self.take(sum(sizes), dtype, device).split(list(sizes)) if sizes else ()

    def rest(self) -> None:
        """Nothing is taken for a while. What is in use stays as it is until the next `take`."""
        if self._buffers and self._buffers[0].device.type != "cpu":
            self.drop()

    def drop(self) -> None:
        """Give back what nothing is in."""
        self._buffers.clear()


class Staging:
    """The memory that updates take on a rank that sends, one after the other."""

    def __init__(self) -> None:
        self.buckets = TurnBuffers()
        self.arriving = TurnBuffers()
        """Parts of other ranks, on their way into a bucket."""
        self.packing = TurnBuffers(1)
        """Parts for engine ranks that are not one run of bytes anywhere."""

    def rest(self) -> None:
        """No bucket is put together for a while."""
        self.buckets.rest()
        self.arriving.rest()

    def drop(self) -> None:
        """Between two updates: give everything back."""
        for buffers in (self.buckets, self.arriving, self.packing):
            buffers.drop()


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """[bytes] uint8: the memory of tensors of one dtype that lie behind each other in one storage;
    None if they do not."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        if (
            tensor.dtype != first.dtype
            or not tensor.is_contiguous()
            or tensor.data_ptr() != end
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return None
        end += tensor.nbytes
    num_elements = sum(tensor.numel() for tensor in tensors)
    return first.detach().as_strided((num_elements,), (1,)).view(torch.uint8)
