"""Starts the ranks of the benchmark on this machine, or finds that a launcher has started us."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, MutableMapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from megatron_magistral.cluster import HUGE_PAGES, free_ports

_CONTEXT = multiprocessing.get_context("forkserver")
_END_S = 2.0
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_SLURM_PORT = 29_501


class RankFailed(RuntimeError):
    """Names the rank that failed first, with its traceback."""


def adopt_launcher(environment: MutableMapping[str, str]) -> bool:
    """Whether torchrun or srun has started this process; srun's variables get torchrun's names.
    Ranks have the huge pages that those of a run have."""
    environment.update(HUGE_PAGES | dict(environment))
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return True
    # An interactive allocation sets these too, for a single task.
    if int(environment.get("SLURM_NTASKS", "1")) <= 1 or "SLURM_PROCID" not in environment:
        return False
    for name, theirs in _SLURM.items():
        environment[name] = environment[theirs]
    environment.setdefault("MASTER_ADDR", _first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(_SLURM_PORT))
    return True


def _first_host(nodes: str) -> str:
    """`gpu[017-020,031],other` -> `gpu017`."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket:
        return nodes.split(",")[0]
    if "," in prefix:
        return prefix.split(",")[0]
    return prefix + rest.replace("]", ",").replace("-", ",").split(",")[0]


def preload(*modules: str) -> None:
    """What new ranks find imported already. Counts until this process has its first rank."""
    _CONTEXT.set_forkserver_preload(list(modules))


def run_local(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float
) -> list[Any]:
    """[`function(*args)` on each of `world_size` new ranks of this machine], by rank. The function
    must be importable, and its result picklable.

    Raises:
        RankFailed: a rank raised, died or gave no result in time. The others are ended.
    """
    (port,) = free_ports(1)
    ranks: list[tuple[Connection, BaseProcess]] = []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process: BaseProcess = _CONTEXT.Process(
            target=_main, args=(theirs, function, rank, world_size, port, args), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((ours, process))
    try:
        results = _results([pipe for pipe, _ in ranks], timeout_s)
        return [results[rank] for rank in range(world_size)]
    finally:
        for pipe, process in ranks:
            process.join(timeout=_END_S)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def _results(pipes: list[Connection], timeout_s: float) -> dict[int, Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = ", ".join(str(rank) for rank in waiting.values())
            raise RankFailed(f"no result from ranks {silent} within {timeout_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                is_result, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not is_result:
                raise RankFailed(f"rank {rank}:\n{value}")
            results[rank] = value
    return results


def _main(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    args: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        outcome = (True, function(*args))
    except BaseException:
        # The edge of a worker: whatever happened goes to the parent, which fails with it.
        outcome = (False, traceback.format_exc())
    # Not `pipe.send`: it hands tensors over as files that end with this process.
    pipe.send_bytes(pickle.dumps(outcome))
