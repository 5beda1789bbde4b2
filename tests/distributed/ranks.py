"""Runs a function on several ranks that talk over gloo, and returns what each of them returned.

Ranks are forked from a server that has imported the trainer once, so starting them costs little.
Every rank runs on one thread: numbers must not depend on the machine.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.broadcast.launch import preload, run_local

preload("megatron_magistral.trainer.step", "tests.trainer.models")


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """[function(*args) on rank 0, ... on rank world_size - 1]. Raises RankFailed."""
    return run_local(_on_one_thread, world_size, timeout_s, function, *args, timeout_s=timeout_s)


def _on_one_thread(timeout_s: float, function: Callable[..., Any], *args: Any) -> Any:
    faulthandler.dump_traceback_later(timeout_s)  # where a rank hangs, in the output of the test
    torch.set_num_threads(1)
    return function(*args)
