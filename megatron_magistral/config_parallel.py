"""The trainer's layout. A section of `config.Config`."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from megatron_magistral.config_section import Positive, PositiveFloat, Section


class ParallelConfig(Section):
    """The trainer's layout; its world size is tensor x pipeline x data."""

    tensor: Positive = 1
    pipeline: Positive = 1
    data: Positive = 1
    virtual_pipeline: Positive = 1
    """Model chunks of each pipeline rank, taken in turn (the interleaved schedule): less of a
    step is spent waiting, for more messages."""
    expert: Positive = 1
    """Ranks that share the experts of a layer, each holding whole ones: of the tensor x data ranks
    of a pipeline stage, so it adds none. With 1, experts are divided over the tensor ranks."""
    sequence: bool = True
    """Sequence parallelism (only has an effect where tensor > 1)."""
    recompute: bool = False
    """Keep only the inputs of layers for the backward pass: less memory, a third more work."""
    timeout_s: PositiveFloat = 600.0
    """After which a collective that some rank did not join is an error."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @model_validator(mode="after")
    def _chunks_need_a_pipeline(self) -> Self:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual_pipeline = {self.virtual_pipeline} needs pipeline > 1: there is nothing "
                "to interleave"
            )
        return self

    @model_validator(mode="after")
    def _experts_fit_a_stage(self) -> Self:
        if self.tensor * self.data % self.expert:
            raise ValueError(
                f"expert = {self.expert} must divide tensor x data = {self.tensor * self.data}"
            )
        return self
