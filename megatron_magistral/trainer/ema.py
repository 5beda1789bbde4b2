"""An exponential moving average of the weights: the reference of the KL ablation (section 7.4.2).

Each rank averages its own shards in fp32; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightAverage:
    """average = decay * average + (1 - decay) * weights, starting from the weights as they are."""

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self._parameters = list(parameters)
        self._decay = decay
        # `clone` even if it is fp32 already: the average must not follow the weight's storage.
        self._averages = [p.detach().float().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        weights = [p.detach().float() for p in self._parameters]
        torch._foreach_lerp_(self._averages, weights, 1 - self._decay)

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Within the context the parameters hold the average; afterwards, bit for bit, what they
        held before. They keep their storage, which Megatron's buffers share."""
        saved = [p.detach().clone() for p in self._parameters]
        torch._foreach_copy_(self._parameters, self._averages)
        try:
            yield
        finally:
            torch._foreach_copy_(self._parameters, saved)

    def state(self) -> list[Tensor]:
        """The averages themselves, in the order of the parameters, for a checkpoint to fill."""
        return self._averages
