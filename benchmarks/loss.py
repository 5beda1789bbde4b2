"""`magistral bench loss`: memory and time of log-probabilities and entropy, ours and the plain way.

The plain way keeps the logits of all rows in fp32 and lets autograd go through log_softmax, gather
and the entropy's sum. Both ways do forward and backward on the same numbers, each in a process of
its own, in turns; that loss and gradients agree is checked in every round. Peak memory is above
what the process holds before: inputs, torch. On the CPU time is CPU time, which other processes
disturb least.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_magistral.trainer.logprobs import logprobs_and_entropy

MAX_MEMORY_RATIO = 1 / 8
MAX_TIME_RATIO = 1.1
SAME = 1e-4  # relative; sums over 131072 entries in fp32
ROUND_TIMEOUT_S = 600.0
MIB = 1 << 20


class Way(StrEnum):
    OURS = "ours"
    PLAIN = "plain"


@dataclass(frozen=True)
class Work:
    """Shapes: hidden states [num_tokens, hidden_size], weight [vocab_size, hidden_size]."""

    num_tokens: int
    vocab_size: int
    hidden_size: int
    num_threads: int
    with_entropy: bool

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """As a run has it there."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32


@dataclass(frozen=True)
class Round:
    """One forward and backward pass. The last three say that the work was the same."""

    time_s: float
    peak_mib: float
    loss: float
    hidden_grad_norm: float
    weight_grad_norm: float


def plain(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """What one writes first."""
    logp_RV = torch.log_softmax((hidden_RH @ weight_VH.T).float(), dim=-1)
    return logp_RV.gather(-1, targets_R[:, None])[:, 0], -(logp_RV.exp() * logp_RV).sum(-1)


FUNCTIONS: dict[Way, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    Way.OURS: logprobs_and_entropy,
    Way.PLAIN: plain,
}


# --- in the process of one way ----------------------------------------------------------------


def make_inputs(work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, std: float) -> Tensor:
        values = torch.randn(rows, work.hidden_size, generator=generator) * std
        return values.to(work.device, work.dtype).requires_grad_()

    hidden_RH = normal(work.num_tokens, 1.0)
    weight_VH = normal(work.vocab_size, 2.0 * work.hidden_size**-0.5)
    targets_R = torch.randint(work.vocab_size, (work.num_tokens,), generator=generator)
    return hidden_RH, weight_VH, targets_R.to(work.device)


def run_one(way: Way, work: Work) -> Round:
    """A round in this process, after a warm-up on a sixteenth of the rows."""
    torch.set_num_threads(work.num_threads)
    hidden_RH, weight_VH, targets_R = make_inputs(work)
    few = max(1, work.num_tokens // 16)
    warm_up = (hidden_RH[:few].detach().requires_grad_(), weight_VH, targets_R[:few])
    measure(FUNCTIONS[way], warm_up, work)
    return measure(FUNCTIONS[way], (hidden_RH, weight_VH, targets_R), work)


def measure(
    function: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, Tensor, Tensor],
    work: Work,
) -> Round:
    on_cpu = work.device == "cpu"
    hidden_RH, weight_VH, _ = inputs
    hidden_RH.grad = weight_VH.grad = None
    memory = _ResidentMemory() if on_cpu else _CudaMemory()
    clock = time.process_time if on_cpu else _cuda_clock
    begin = clock()
    logprobs_R, entropy_R = function(*inputs)
    loss = -logprobs_R.mean()
    if work.with_entropy:
        loss = loss - 0.01 * entropy_R.mean()
    loss.backward()
    time_s = clock() - begin
    assert hidden_RH.grad is not None and weight_VH.grad is not None
    norms = (float(t.grad.float().norm()) for t in (hidden_RH, weight_VH))
    return Round(time_s, memory.peak_mib(), float(loss.detach()), *norms)


def _cuda_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


class _CudaMemory:
    """Peak of the allocator above what is allocated now."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def peak_mib(self) -> float:
        return (torch.cuda.max_memory_allocated() - self._before) / MIB


class _ResidentMemory:
    """Peak resident memory of this process above what is resident now."""

    def __init__(self) -> None:
        # Resets the kernel's high-water mark, which else remembers the time before.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._status_mib("VmRSS")

    def peak_mib(self) -> float:
        return self._status_mib("VmHWM") - self._before

    @staticmethod
    def _status_mib(key: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))


# --- both, in turns ---------------------------------------------------------------------------


def compare(work: Work, num_rounds: int) -> dict[Way, list[Round]]:
    """Rounds of each way. Raises RuntimeError if the ways disagree, or if one does not end."""
    rounds: dict[Way, list[Round]] = {way: [] for way in Way}
    for _ in range(num_rounds):
        for way in Way:
            rounds[way].append(_in_own_process(way, work))
        _check_same(rounds[Way.OURS][-1], rounds[Way.PLAIN][-1])
    return rounds


def _in_own_process(way: Way, work: Work) -> Round:
    options = [
        *("--way", way, "--num-tokens", work.num_tokens, "--vocab-size", work.vocab_size),
        *("--hidden-size", work.hidden_size, "--num-threads", work.num_threads),
        "--with-entropy" if work.with_entropy else "--no-with-entropy",
    ]
    command = [sys.executable, "-m", "benchmarks.loss", *map(str, options)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=ROUND_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{way}: no result within {ROUND_TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{way}: its process ended with {error.returncode}") from None
    return Round(**json.loads(done.stdout))


def _check_same(ours: Round, plain: Round) -> None:
    for key in ("loss", "hidden_grad_norm", "weight_grad_norm"):
        mine, theirs = getattr(ours, key), getattr(plain, key)
        if abs(mine - theirs) > SAME * abs(theirs):
            raise RuntimeError(f"{key}: {mine} is not the plain way's {theirs}")


@dataclass(frozen=True)
class Summary:
    ours_mib: float
    plain_mib: float
    memory_ratio: float
    ours_s: float
    plain_s: float
    time_ratio: float
    """Median over rounds of ours / plain of the same round."""


def summarize(rounds: dict[Way, list[Round]]) -> Summary:
    ours, plain = rounds[Way.OURS], rounds[Way.PLAIN]
    ours_mib, plain_mib = (max(r.peak_mib for r in way) for way in (ours, plain))
    times = [[r.time_s for r in way] for way in (ours, plain)]
    return Summary(
        ours_mib=ours_mib,
        plain_mib=plain_mib,
        memory_ratio=ours_mib / plain_mib,
        ours_s=statistics.median(times[0]),
        plain_s=statistics.median(times[1]),
        time_ratio=statistics.median(a / b for a, b in zip(*times, strict=True)),
    )


def main(
    num_tokens: Annotated[int, typer.Option(min=1)] = 4096,
    vocab_size: Annotated[int, typer.Option(min=1)] = 131072,
    hidden_size: Annotated[int, typer.Option(min=1)] = 256,
    num_threads: Annotated[int, typer.Option(min=1, help="On the CPU.")] = 1,
    num_rounds: Annotated[int, typer.Option(min=1, help="Of each way.")] = 3,
    with_entropy: Annotated[bool, typer.Option(help="An entropy bonus in the loss.")] = True,
    way: Annotated[Way | None, typer.Option(help="Measure one way, print a line of JSON.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    """Compare the two ways; exit with 1 if a target is missed."""
    work = Work(num_tokens, vocab_size, hidden_size, num_threads, with_entropy)
    if way is not None:
        print(json.dumps(asdict(run_one(way, work))))
        return
    found = summarize(compare(work, num_rounds))
    console = Console()
    title = f"{num_tokens} tokens, vocabulary {vocab_size}, hidden size {hidden_size}"
    table = Table(
        "", "ours", "plain", "ratio", "target", title=f"{title}, {work.dtype} on {work.device}"
    )
    table.add_row(
        "peak memory, MiB",
        f"{found.ours_mib:.0f}",
        f"{found.plain_mib:.0f}",
        f"{found.memory_ratio:.3f}",
        f"<= {MAX_MEMORY_RATIO:.3f}",
    )
    table.add_row(
        "forward + backward, s",
        f"{found.ours_s:.2f}",
        f"{found.plain_s:.2f}",
        f"{found.time_ratio:.2f}",
        f"<= {MAX_TIME_RATIO}",
    )
    console.print(table)
    if out is not None:
        out.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    if found.memory_ratio > MAX_MEMORY_RATIO or found.time_ratio > MAX_TIME_RATIO:
        console.print("a target is missed", style="bold red")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
