"""The process groups of the benchmark: of the layout, of each engine, of sender and all engines.

Every rank makes every group, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.broadcast.results import Options
from megatron_magistral.weights.gather import Mesh
from megatron_magistral.weights.store_group import Channels, channel_names


def join(options: Options) -> int:
    """Joins all ranks; this one's number. Raises ValueError for another number of them."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_s))
    if dist.get_world_size() != options.world_size:
        raise ValueError(
            f"{dist.get_world_size()} ranks were started, trainer and generators need "
            f"{options.trainer.world_size} + {options.world_size - options.trainer.world_size}"
        )
    return dist.get_rank()


def own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def wire_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def own_group(groups: Sequence[Sequence[int]], backend: str) -> Any:
    """The one of these groups that this rank is in; every rank makes all of them."""
    made = [(ranks, dist.new_group(list(ranks), backend=backend)) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


def make_mesh(options: Options) -> Mesh | None:
    t = options.trainer
    grid = torch.arange(t.world_size).view(t.pp, t.dp, t.tp)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    tp_group = own_group(grid.reshape(-1, t.tp).tolist(), backend)
    pp_group = own_group(grid.permute(1, 2, 0).reshape(-1, t.pp).tolist(), backend)
    dp_group = own_group(grid.permute(0, 2, 1).reshape(-1, t.dp).tolist(), backend)
    if tp_group is None:
        return None
    pp_rank, dp_rank, tp_rank = (grid == dist.get_rank()).nonzero()[0].tolist()
    return Mesh(tp_rank, t.tp, pp_rank, t.pp, dp_rank, t.dp, tp_group, pp_group, dp_group)


def make_engine_groups(options: Options) -> tuple[Any, list[Any]]:
    """The ranks of this rank's engine, over gloo; and the groups of sender and engine ranks that
    this rank is in, as an update forms them: one of all, or one of each rank number."""
    if options.engine_urls:
        return None, []
    first = options.trainer.world_size
    everyone = list(range(first, first + options.generator.world_size))
    tp = options.generator.tp
    peers = own_group([everyone[i : i + tp] for i in range(0, len(everyone), tp)], "gloo")
    parts = [everyone[rank::tp] for rank in range(tp)] if options.is_direct else [everyone]
    groups = [own_group([[0, *part]], wire_backend()) for part in parts]
    return peers, [group for group in groups if group is not None]


def make_channels(options: Options) -> list[Channels]:
    """What the plan `direct` sends over, one for each part that this rank sends or receives."""
    if options.engine_urls or not options.is_direct:
        return []
    first, tp = options.trainer.world_size, options.generator.tp
    everyone = list(range(first, first + options.generator.world_size))
    backend = wire_backend()
    made = [
        [own_group([[0, *everyone[rank::tp]]], backend) for _ in channel_names("", backend)]
        for rank in range(tp)
    ]
    return [Channels(groups) for groups in made if groups[0] is not None]


def exchange_urls(url: str | None) -> tuple[str, ...]:
    urls: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(urls, url)
    return tuple(each for each in urls if each)


def local_host() -> str:
    """How other ranks reach this one."""
    master = os.environ["MASTER_ADDR"]
    return master if master in ("127.0.0.1", "localhost") else os.uname().nodename
