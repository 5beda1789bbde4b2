"""Groups that meet at a store: several side by side, as one."""

from __future__ import annotations

from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.distributed_c10d import _world

from megatron_magistral.weights import store_group
from megatron_magistral.weights.store_group import Channels, channel_names
from tests.rollout.fake_engine import gloo_at_store

TIMEOUT = timedelta(seconds=20)


def _peers(store: dist.Store, names: list[str]) -> tuple[Thread, list[Any]]:
    """They join in the background."""
    made: list[Any] = []
    thread = Thread(target=lambda: made.extend(gloo_at_store(store, name, 1, 2) for name in names))
    thread.start()
    return thread, made


def test_what_is_sent_over_channels_arrives_in_its_order_and_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_group, "PIECE_BYTES", 1000)
    store = dist.HashStore()
    thread, made = _peers(store, channel_names("all", "gloo"))
    ours = Channels.join(store, "all", 0, 2, "gloo", 20.0)
    thread.join()
    theirs = Channels(made)
    sent = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 999, 1000, 3500, 7)]
    came = [torch.empty_like(data) for data in sent]
    expected = [work for data in came for work in theirs.receive(data, 20.0)]
    for work in [work for data in sent for work in ours.send(data, 20.0)] + expected:
        work.wait(TIMEOUT)
    assert all(map(torch.equal, sent, came))
    ours.leave()


def test_who_does_not_get_into_all_channels_is_in_none() -> None:
    store = dist.HashStore()
    first, *_ = channel_names("half", "gloo")
    thread, _ = _peers(store, [first])
    known = len(_world.pg_map)
    with pytest.raises(RuntimeError):
        Channels.join(store, "half", 0, 2, "gloo", 2.0)
    thread.join()
    assert len(_world.pg_map) == known


@given(sizes=st.lists(st.integers(0, 10**9), max_size=40))
def test_no_channel_gets_more_than_another_by_more_than_a_piece(sizes: list[int]) -> None:
    groups: Any = ["one", "other"]
    channels, load = Channels(groups), dict.fromkeys(groups, 0)
    for size in sizes:
        for group, piece in channels._spread(torch.empty(size, dtype=torch.uint8, device="meta")):
            assert piece.nbytes <= store_group.PIECE_BYTES
            load[group] += piece.nbytes
    assert sum(load.values()) == sum(sizes)
    assert abs(load["one"] - load["other"]) <= store_group.PIECE_BYTES
