"""An all-reduce over every GPU of the job (every place for a process, where there are none), with
the backend that training will use, before anything expensive is started.

Ranks check in first: one that does not come is named, instead of a job that hangs. Then the sum
must be right, its time is shown, and the clocks of the nodes are compared.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

CHECK_IN_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 60.0
NUM_BYTES = {"nccl": 256 << 20, "gloo": 1 << 20}
NUM_TRIES = 5
MAX_CLOCK_SKEW_S = 1.0


class LinkError(RuntimeError):
    """Nodes that did not come, or a collective that failed; says which, and after how long."""


@dataclass(frozen=True)
class LinkResult:
    backend: str
    num_ranks: int
    num_bytes: int
    median_s: float
    clocks: Mapping[str, float]
    """Unix time by node, all read right after the same barrier."""

    def __str__(self) -> str:
        bus_gb_s = 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes / self.median_s / 1e9
        return (
            f"all-reduce over {self.num_ranks} ranks ({self.backend}): {self.num_bytes >> 20} MiB "
            f"in {self.median_s * 1e3:.1f} ms, bus bandwidth {bus_gb_s:.3g} GB/s"
        )


def check_links(
    rank: int, nodes: Sequence[str], local_rank: int, address: str, port: int
) -> LinkResult:
    """Collective. `nodes` has the node of every rank; rank 0 listens at `address`:`port`.

    Raises LinkError.
    """
    store = _check_in(rank, nodes, address, port)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    backend = "nccl" if on_gpu else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=len(nodes), timeout=timeout)
    try:
        seconds = _all_reduce(len(nodes), NUM_BYTES[backend], "cuda" if on_gpu else "cpu")
    except RuntimeError as error:
        raise LinkError(
            f"rank {rank} on {nodes[rank]}: the all-reduce ({backend}) failed: {error}"
        ) from error
    clocks: list[float] = [0.0] * len(nodes)
    dist.barrier()
    dist.all_gather_object(clocks, time.time())
    dist.destroy_process_group()
    by_node = dict(zip(nodes, clocks, strict=True))
    return LinkResult(backend, len(nodes), NUM_BYTES[backend], statistics.median(seconds), by_node)


def clock_problems(clocks: Mapping[str, float]) -> list[str]:
    """A line for each node whose clock is off the median: times in logs and limits would lie."""
    middle = statistics.median(clocks.values())
    return [
        f"{node}: its clock is {clock - middle:+.1f} s off the median of {len(clocks)} nodes, at "
        f"most {MAX_CLOCK_SKEW_S:g} s are allowed: start NTP on it"
        for node, clock in clocks.items()
        if abs(clock - middle) > MAX_CLOCK_SKEW_S
    ]


def _check_in(rank: int, nodes: Sequence[str], address: str, port: int) -> dist.TCPStore:
    begin = time.monotonic()
    timeout = timedelta(seconds=CHECK_IN_TIMEOUT_S)
    try:
        store = dist.TCPStore(
            address, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout
        )
        store.set(f"here/{rank}", json.dumps(nodes[rank]))
        if rank == 0:
            _await_all(store, nodes, begin)
            store.set("all here", "")
        store.wait(["all here"], timeout)
    except dist.DistError as error:
        after_s = time.monotonic() - begin
        raise LinkError(
            f"{nodes[rank]}: no word from {nodes[0]} at {address}:{port} after {after_s:.0f} s: a "
            f"firewall or a wrong interface between the two ({str(error).splitlines()[0]})"
        ) from error
    return store


def _await_all(store: dist.TCPStore, nodes: Sequence[str], begin: float) -> None:
    keys = [f"here/{rank}" for rank in range(len(nodes))]
    while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
        after_s = time.monotonic() - begin
        if after_s > CHECK_IN_TIMEOUT_S:
            who = sorted({nodes[rank] for rank in missing})
            raise LinkError(
                f"{', '.join(who)}: {len(missing)} of {len(nodes)} ranks did not reach "
                f"{nodes[0]} within {after_s:.0f} s"
            )
        time.sleep(0.2)


def _all_reduce(num_ranks: int, num_bytes: int, device: str) -> list[float]:
    """Seconds of each try but the first, which sets up connections."""
    seconds = []
    for _ in range(NUM_TRIES + 1):
        data = torch.ones(num_bytes // 4, device=device)
        begin = time.monotonic()
        dist.all_reduce(data)
        wrong = int((data != num_ranks).sum())  # waits for the collective
        seconds.append(time.monotonic() - begin)
        if wrong:
            raise RuntimeError(f"{wrong} of {data.numel()} sums are wrong: a broken link or GPU")
    return seconds[1:]
