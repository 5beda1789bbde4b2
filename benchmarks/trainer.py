"""`magistral bench trainer`: tokens per second of forward and backward, ours and transformers'.

The same model, the same sequences, one process, the same number of threads, fp32 on the CPU; the
loss is the cross-entropy of every token but the first of a sequence. transformers runs the
sequences in three ways, and the fastest counts:

    padded       one batch with an attention mask (without one where all lengths are equal)
    one by one   batches of one sequence, gradients added up
    packed       one row, position_ids that restart: transformers makes a block-diagonal mask

Attention alone is measured on the heavy-tailed lengths: segment by segment, and as a padded batch.
All run in turns. A few rounds tell which ways of transformers can be the fastest; those go on, and
a ratio is the median over rounds, to the one with the best median: the best of each round would be
compared by its luck. On the CPU time is CPU time, which other processes disturb least.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_magistral.cluster import free_ports
from megatron_magistral.trainer.attention import PackedAttention
from megatron_magistral.trainer.batch import PackedBatch
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.logprobs import Head
from megatron_magistral.trainer.objective import SupervisedObjective
from megatron_magistral.trainer.settings import OptimizerSettings
from megatron_magistral.trainer.step import Trainer
from megatron_magistral.types import TrainSequence

MIN_SPEED_RATIO = 1.0
MIN_ATTENTION_RATIO = 1.5
NUM_TRIAL_ROUNDS = 3
CLEARLY_SLOWER = 1.25  # than the fastest: such a way is not measured further
SAME_LOSS = 1e-4  # relative
MODEL: dict[str, Any] = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)


class Lengths(StrEnum):
    EQUAL = "equal"
    PARETO = "Pareto"


def draw_lengths(kind: Lengths, seed: int) -> list[int]:
    """Tokens of each sequence: equal ones, or heavy-tailed ones as completions have them."""
    if kind is Lengths.EQUAL:
        return [256] * 4
    rng = random.Random(seed)
    return [min(int(48 * rng.paretovariate(1.1)), 512) for _ in range(12)]


# --- the two trainers, on the same sequences --------------------------------------------------


@dataclass(frozen=True)
class Work:
    sequences: tuple[tuple[int, ...], ...]

    @staticmethod
    def draw(kind: Lengths, seed: int) -> Work:
        rng = random.Random(seed)
        vocab_size = MODEL["vocab_size"]
        lengths = draw_lengths(kind, seed)
        return Work(tuple(tuple(rng.randrange(vocab_size) for _ in range(n)) for n in lengths))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def num_targets(self) -> int:
        return self.num_tokens - len(self.sequences)


def ours(trainer: Trainer, work: Work) -> Callable[[], float]:
    """One microbatch, packed."""
    sequences = [
        TrainSequence(tokens, 1, (), (), advantage=0.0, weight=1.0 / work.num_targets)
        for tokens in work.sequences
    ]
    batches = trainer.pack(sequences, max_tokens=work.num_tokens)
    objective = SupervisedObjective()

    def loss(hidden_RH: Tensor, head: Head, batch: PackedBatch) -> tuple[Tensor, Any]:
        outputs = objective.loss(*head.score(hidden_RH, batch.targets_R, 1.0), batch)
        return outputs.loss, outputs.metrics["loss"]

    def run() -> float:
        trainer.model.zero_grad()
        return float(sum(trainer.model.forward_backward(batches, loss)))

    return run


def padded(model: Any, work: Work) -> Callable[[], float]:
    lengths = [len(tokens) for tokens in work.sequences]
    shape = (len(lengths), max(lengths))
    tokens = torch.zeros(shape, dtype=torch.long, device=model.device)
    labels, mask = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for row, sequence in enumerate(work.sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        labels[row, : len(sequence)] = tokens[row, : len(sequence)]
        mask[row, : len(sequence)] = 1
    options = {} if min(lengths) == max(lengths) else {"attention_mask": mask}
    return _transformers_run(model, [(tokens, labels, 1.0, options)])


def one_by_one(model: Any, work: Work) -> Callable[[], float]:
    rows = [torch.tensor(tokens, device=model.device)[None] for tokens in work.sequences]
    return _transformers_run(
        model, [(row, row, (row.numel() - 1) / work.num_targets, {}) for row in rows]
    )


def packed(model: Any, work: Work) -> Callable[[], float]:
    lengths = [len(tokens) for tokens in work.sequences]
    tokens = torch.tensor([t for s in work.sequences for t in s], device=model.device)[None]
    labels = tokens.clone()
    labels[0, [0, *accumulate(lengths[:-1])]] = -100
    positions = torch.cat([torch.arange(n, device=model.device) for n in lengths])[None]
    return _transformers_run(model, [(tokens, labels, 1.0, {"position_ids": positions})])


def _transformers_run(
    model: Any, batches: Sequence[tuple[Tensor, Tensor, float, dict[str, Tensor]]]
) -> Callable[[], float]:
    """(tokens, labels, weight of the mean loss, options) of every batch."""

    def run() -> float:
        model.zero_grad()
        total = 0.0
        for tokens, labels, weight, options in batches:
            loss = weight * model(tokens, labels=labels, use_cache=False, **options).loss
            loss.backward()
            total += float(loss.detach())
        return total

    return run


TRANSFORMERS: dict[str, Callable[[Any, Work], Callable[[], float]]] = {
    "transformers, padded": padded,
    "transformers, one by one": one_by_one,
    "transformers, packed": packed,
}


# --- attention alone --------------------------------------------------------------------------


def attention_ways(lengths: Sequence[int], device: torch.device) -> dict[str, Callable[[], float]]:
    """Forward and backward of one layer's attention: [tokens, heads, size] each way."""
    heads, kv_heads = MODEL["num_attention_heads"], MODEL["num_key_value_heads"]
    size = MODEL["hidden_size"] // heads
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), n, size, generator=generator).to(device).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    bounds = torch.tensor([0, *accumulate(lengths)])
    config = SimpleNamespace(window_size=None, window_attn_skip_freq=None)
    attention = PackedAttention(config, layer_number=1)
    ends = torch.tensor(lengths, device=device)[:, None]
    inside = torch.arange(max(lengths), device=device) < ends
    pq, pk, pv = (
        torch.zeros(len(lengths), max(lengths), *t.shape[1:], device=device)
        .masked_scatter_(inside[..., None, None], t.detach())
        .requires_grad_()
        for t in (q, k, v)
    )

    def segments() -> float:
        output = attention(q, k, v, None, packed_seq_params=SimpleNamespace(cu_seqlens_q=bounds))
        return _backward(output.square().sum(), q, k, v)

    def padded_batch() -> float:
        q, k, v = (t.transpose(1, 2) for t in (pq, pk, pv))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        real = output.transpose(1, 2) * inside[..., None, None]
        return _backward(real.square().sum(), pq, pk, pv)

    return {"segments": segments, "padded": padded_batch}


def _backward(loss: Tensor, *inputs: Tensor) -> float:
    torch.autograd.grad(loss, inputs)
    return float(loss.detach())


# --- in turns ---------------------------------------------------------------------------------


def measure(ways: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after a warm-up. Raises RuntimeError if the ways do not
    give the same loss."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_rounds + 1):
        losses = {}
        for name, way in ways.items():
            begin = _clock()
            losses[name] = way()
            if number:
                times[name].append(_clock() - begin)
        low, high = min(losses.values()), max(losses.values())
        if high - low > SAME_LOSS * abs(high):
            raise RuntimeError(f"not the same work: {losses}")
    return times


def _clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def speed_ratio(times: Mapping[str, list[float]], name: str, other: str) -> float:
    """How many times as fast as `other`: median over rounds."""
    pairs = zip(times[other], times[name], strict=True)
    return statistics.median(theirs / mine for theirs, mine in pairs)


@dataclass(frozen=True)
class Comparison:
    """Median seconds of every way, and how many times as fast ours is as the fastest other."""

    seconds: dict[str, float]
    fastest: str
    ratio: float


def compare(ways: Mapping[str, Callable[[], float]], num_rounds: int) -> Comparison:
    """`ways` has "ours" and those of TRANSFORMERS."""
    trial = _medians(measure(ways, NUM_TRIAL_ROUNDS))
    limit = CLEARLY_SLOWER * min(trial[name] for name in TRANSFORMERS)
    names = ["ours", *(name for name in TRANSFORMERS if trial[name] <= limit)]
    times = measure({name: ways[name] for name in names}, num_rounds)
    medians = _medians(times)
    fastest = min(names[1:], key=medians.__getitem__)
    return Comparison(trial | medians, fastest, speed_ratio(times, "ours", fastest))


def _medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def make_models(num_threads: int) -> tuple[Trainer, Any]:
    """The same random weights in both."""
    torch.set_num_threads(num_threads)
    (port,) = free_ports(1)
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODEL)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="sdpa"
    )
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        settings = OptimizerSettings(lr=1e-3)
        trainer = Trainer.create(Path(directory), ParallelLayout(), settings, dtype=dtype)
    return trainer, model.to(trainer.model.device)


def main(
    num_threads: Annotated[int, typer.Option(min=1, help="On the CPU.")] = 1,
    num_rounds: Annotated[int, typer.Option(min=1, help="After a warm-up.")] = 15,
    seed: Annotated[int, typer.Option(help="Of lengths and tokens.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    """Compare with transformers; exit with 1 if a target is missed."""
    trainer, model = make_models(num_threads)
    console, numbers, missed = Console(), {}, []
    for kind in Lengths:
        work = Work.draw(kind, seed)
        ways = {"ours": ours(trainer, work)}
        ways |= {name: make(model, work) for name, make in TRANSFORMERS.items()}
        found = compare(ways, num_rounds)
        numbers[f"forward + backward, {kind} lengths"] = found.ratio
        if found.ratio < MIN_SPEED_RATIO:
            missed.append(
                f"{kind} lengths: {found.ratio:.2f} x transformers, at least {MIN_SPEED_RATIO}"
            )
        title = f"{kind} lengths: {len(work.sequences)} sequences, {work.num_tokens} tokens"
        table = Table("", "tokens/s", title=title)
        for name, seconds in found.seconds.items():
            table.add_row(name, f"{work.num_tokens / seconds:.0f}")
        table.add_row(f"ours / {found.fastest}", f"{found.ratio:.2f}")
        console.print(table)
    ways = attention_ways(draw_lengths(Lengths.PARETO, seed), trainer.model.device)
    ratio = speed_ratio(measure(ways, num_rounds), "segments", "padded")
    numbers["attention, packed / padded"] = ratio
    console.print(f"attention alone, Pareto lengths: {ratio:.2f} x the padded batch's speed")
    if ratio < MIN_ATTENTION_RATIO:
        missed.append(f"attention: {ratio:.2f} x, at least {MIN_ATTENTION_RATIO}")
    trainer.close()
    if out is not None:
        out.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    for line in missed:
        console.print(f"missed: {line}", style="bold red")
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
