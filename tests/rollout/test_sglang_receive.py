"""An engine rank's own end of the plan `direct`: the groups that it is in."""

from __future__ import annotations

from datetime import timedelta
from threading import Thread

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from megatron_magistral.rollout.sglang_receive import Receiver
from megatron_magistral.weights.store_group import channel_names, part_name
from tests.rollout.fake_engine import gloo_at_store


def _join(receiver: Receiver, store: dist.TCPStore, name: str) -> None:
    """`receiver` joins the group `name` of a sender in this process."""
    names = channel_names(part_name(name, 0), "gloo")
    sender = Thread(target=lambda: [gloo_at_store(store, each, 0, 2) for each in names])
    sender.start()
    group = {"host": "127.0.0.1", "port": store.port, "name": name, "rank": 1, "world_size": 2}
    receiver.join({**group, "backend": "gloo", "timeout_s": 20.0})
    sender.join()


def test_a_group_that_its_sender_gave_up_is_left_when_the_next_one_is_joined() -> None:
    """Of two senders, only that of the one that made another."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    receiver, before = Receiver(rank=0), len(_world.pg_map)
    _join(receiver, store, "weights-100-0")
    one = len(_world.pg_map) - before
    _join(receiver, store, "weights-200-0")
    for number in (1, 2):
        _join(receiver, store, f"weights-100-{number}")
    assert len(_world.pg_map) - before == 2 * one > 0
    for name in ("weights-100-2", "weights-200-0"):
        receiver.leave(name)
    assert len(_world.pg_map) == before
