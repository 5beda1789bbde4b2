"""Memory of the benchmark itself, and the memory that a stretch of code takes beyond what was there
before it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_magistral.weights.buffers import wire_buffer

_libc = ctypes.CDLL(None)
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5)


class Scratch:
    """What measurements beside updates need, kept for all rounds: pages that are new to a process
    can cost more than what is measured, and that they come and go can disturb an update."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def model(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, whose pages exist."""
        return self._touched("model", num_bytes)

    def buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        """A buffer for each of `sizes`, all in two of them in turn, as an update uses its
        memory."""
        both = [self._touched(name, max(sizes)) for name in ("one", "other")]
        return [both[number % 2][:size] for number, size in enumerate(sizes)]

    def _touched(self, name: str, num_bytes: int) -> Tensor:
        kept = self._kept.pop(name, None)
        if kept is None or len(kept) < num_bytes:
            del kept  # before there is another one
            kept = wire_buffer(num_bytes, self._device).fill_(1)
        self._kept[name] = kept
        return kept[:num_bytes]


class PeakMemory:
    """Of the device, or on a CPU of the whole process (resident pages)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None

    def start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return
        _libc.malloc_trim(0)  # pages that were freed but kept would hide what is taken next
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            self._before = None  # a kernel or container that does not let us
            return
        self._before = _resident("VmRSS")

    def extra_bytes(self) -> int | None:
        """The peak since `start` less what was there then; None where it cannot be known."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _resident("VmHWM") - self._before)


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10  # in kB
