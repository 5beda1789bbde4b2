"""How a model is spread over ranks, and whether a given model can be. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_magistral.weights.architecture import Architecture


class LayoutError(ValueError):
    """A layout that does not fit the model; names the key, the value and what would be right."""


@dataclass(frozen=True)
class ParallelLayout:
    """Tensor x pipeline x data parallel ranks; each pipeline rank holds `vpp` model chunks.

    `sequence_parallel` splits activations between the tensor-parallel ranks where they would be
    replicated; it has no effect where tp == 1.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    sequence_parallel: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def splits_sequence(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    @property
    def token_multiple(self) -> int:
        """Microbatches are padded to a multiple of this many tokens."""
        return self.tp if self.splits_sequence else 1


def check_layout(arch: Architecture, layout: ParallelLayout) -> None:
    """Raises one LayoutError that lists everything in which the layout does not fit the model."""
    stages = layout.pp * layout.vpp
    rules = [
        (arch.num_heads, layout.tp, "attention heads", "tp"),
        (arch.num_kv_heads, layout.tp, "key/value heads", "tp"),
        (arch.ffn_hidden_size, layout.tp, "feed-forward columns", "tp"),
        (arch.num_layers, stages, "layers", "pp x vpp"),
    ]
    problems = [
        f"{key} = {divisor} must divide the model's {total} {what}"
        for total, divisor, what, key in rules
        if total % divisor
    ]
    if layout.vpp > 1 and layout.pp == 1:
        problems.append(f"vpp = {layout.vpp} needs pp > 1: there is no pipeline to interleave")
    # Every rank must hold at least one real row, or it would have nothing to normalise over.
    rows = -(-arch.vocab_size // layout.tp)
    if rows * (layout.tp - 1) >= arch.vocab_size:
        problems.append(f"tp = {layout.tp} is too large for a vocabulary of {arch.vocab_size}")
    if problems:
        raise LayoutError("; ".join(problems))
