"""Runs a function on several ranks that talk over gloo, and returns what each of them returned.

Ranks are forked from a server that has imported the trainer once, so starting them costs little.
Every rank runs on one thread: numbers must not depend on the machine.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["megatron_magistral.trainer.step", "tests.trainer.models"])


class RankFailed(AssertionError):
    """Names the rank that failed first, with its traceback."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """[function(*args) on rank 0, ... on rank world_size - 1]. The function must be importable,
    and its result must be picklable. On the first failure the other ranks are ended."""
    port = _free_port()
    ranks = [_Rank(function, n, world_size, port, timeout_s, args) for n in range(world_size)]
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size:
            waiting = {r.pipe: r.number for r in ranks if r.number not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                numbers = sorted(waiting.values())
                raise RankFailed(f"ranks {numbers} gave no result within {timeout_s} s")
            for pipe in ready:
                results[waiting[pipe]] = _receive(waiting[pipe], pipe)
    finally:
        for rank in ranks:
            rank.end()
    return [results[rank] for rank in range(world_size)]


class _Rank:
    def __init__(
        self,
        function: Callable[..., Any],
        number: int,
        world_size: int,
        port: int,
        timeout_s: float,
        args: Any,
    ) -> None:
        self.number = number
        self.pipe, theirs = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_main,
            args=(theirs, function, number, world_size, port, timeout_s, args),
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def end(self) -> None:
        self._process.join(timeout=2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()


def _receive(rank: int, pipe: Connection) -> Any:
    try:
        is_result, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RankFailed(f"rank {rank} died without a word") from None
    if not is_result:
        raise RankFailed(f"rank {rank}:\n{value}")
    return value


def _main(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    args: Any,
) -> None:
    faulthandler.dump_traceback_later(timeout_s)  # where a rank hangs, in the output of the test
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        result = function(*args)
    except BaseException:
        # The edge of a worker: whatever happened goes to the test, which fails with it.
        outcome = (False, traceback.format_exc())
    else:
        outcome = (True, result)
    # Not `pipe.send`: it hands tensors over as files that end with this process.
    pipe.send_bytes(pickle.dumps(outcome))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
