"""How a model is spread over ranks, and whether a given model can be. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_magistral.config_parallel import ParallelConfig
from megatron_magistral.weights.architecture import Architecture


class LayoutError(ValueError):
    """A layout that does not fit the model; names the key, the value and what would be right."""


@dataclass(frozen=True)
class ParallelLayout:
    """Tensor x pipeline x data parallel ranks; each pipeline rank holds `vpp` model chunks.

    `sequence_parallel` splits activations between the tensor-parallel ranks where they would be
    replicated; it has no effect where tp == 1.

    `ep` of the tp x dp ranks of a stage share the experts of its layers; it adds no ranks. Such a
    rank holds whole experts. To divide these over tensor-parallel ranks as well would gather every
    token on each of them, in uneven parts, which gloo cannot do.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    sequence_parallel: bool = True
    ep: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig) -> ParallelLayout:
        """The layout that section `parallel` of a config describes."""
        return cls(
            tp=parallel.tensor,
            pp=parallel.pipeline,
            dp=parallel.data,
            vpp=parallel.virtual_pipeline,
            sequence_parallel=parallel.sequence,
            ep=parallel.expert,
        )

    @property
    def etp(self) -> int:
        """How many tensor-parallel ranks an expert is divided over."""
        return self.tp if self.ep == 1 else 1

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
        (arch.num_layers, stages, "layers", "pp x vpp"),
    ]
    if arch.experts is None:
        rules.append((arch.ffn_hidden_size, layout.tp, "feed-forward columns", "tp"))
    else:
        rules.append((arch.experts.num, layout.ep, "experts", "ep"))
        rules.append((arch.experts.ffn_hidden_size, layout.etp, "columns of an expert", "tp"))
        if arch.experts.shared_ffn_hidden_size is not None:
            columns = arch.experts.shared_ffn_hidden_size
            rules.append((columns, layout.tp, "columns of the shared expert", "tp"))
    problems = [
        f"{key} = {divisor} must divide the model's {total} {what}"
        for total, divisor, what, key in rules
        if total % divisor
    ]
    problems += _expert_problems(arch, layout)
    if layout.vpp > 1 and layout.pp == 1:
        problems.append(f"vpp = {layout.vpp} needs pp > 1: there is no pipeline to interleave")
    # Every rank must hold at least one real row, or it would have nothing to normalise over.
    rows = -(-arch.vocab_size // layout.tp)
    if rows * (layout.tp - 1) >= arch.vocab_size:
        problems.append(f"tp = {layout.tp} is too large for a vocabulary of {arch.vocab_size}")
    if problems:
        raise LayoutError("; ".join(problems))


def _expert_problems(arch: Architecture, layout: ParallelLayout) -> Iterator[str]:
    if arch.experts is None:
        if layout.ep > 1:
            yield f"ep = {layout.ep} must be 1: the model has no experts"
        return
    ranks, per_copy = layout.tp * layout.dp, layout.ep * layout.etp
    if ranks % per_copy:
        yield f"ep x etp = {per_copy} must divide the tp x dp = {ranks} ranks of a stage"
    if layout.tp > 1 and not layout.sequence_parallel:
        yield (
            f"tp = {layout.tp} needs sequence parallelism: without it every tensor-parallel rank "
            "would send the same tokens to the experts"
        )
