"""Addresses as files: whole or not there, waited for in bounded time, and missing ones by name."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megatron_magistral.slurm.address_book import (
    AddressBook,
    AddressTimeout,
    own_address,
)
from megatron_magistral.slurm.plan import RoleName
from tests.slurm.jobs import planned_run


def test_what_is_published_is_found_in_order(tmp_path: Path) -> None:
    run, plan, _ = planned_run(tmp_path)
    book = AddressBook(run, plan, "rl")
    for index in (1, 0):
        book.publish(RoleName.VERIFIER, index, f"http://h{index}:1")
    assert book.wait(RoleName.VERIFIER, 2, timeout_s=0.0) == ["http://h0:1", "http://h1:1"]


def test_an_address_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    run, plan, _ = planned_run(tmp_path)
    book = AddressBook(run, plan, "rl")
    late = threading.Timer(0.3, book.publish, (RoleName.CONTROLLER, 0, "http://h:1"))
    late.start()
    assert book.wait(RoleName.CONTROLLER, 1, timeout_s=60.0) == ["http://h:1"]
    late.join()


def test_who_does_not_say_where_it_is_is_named_with_its_node(tmp_path: Path) -> None:
    run, plan, _ = planned_run(tmp_path)
    book = AddressBook(run, plan, "rl")
    book.publish(RoleName.VERIFIER, 0, "http://h0:1")
    with pytest.raises(AddressTimeout, match=r"^verifier 1 on n1: no address in .*/7\.0/rl after"):
        book.wait(RoleName.VERIFIER, 2, timeout_s=0.0)


def test_phases_and_attempts_do_not_see_each_others_addresses(tmp_path: Path) -> None:
    run, plan, _ = planned_run(tmp_path)
    AddressBook(run, plan, "sft").publish(RoleName.TRAINER, 0, "h:1")
    with pytest.raises(AddressTimeout):
        AddressBook(run, plan, "rl").wait(RoleName.TRAINER, 1, timeout_s=0.0)


def test_all_ranks_meet_where_rank_0_says(tmp_path: Path) -> None:
    run, plan, _ = planned_run(tmp_path)
    book = AddressBook(run, plan, "rl")
    met = book.rendezvous(0, "127.0.0.1", timeout_s=0.0)
    assert met[0] == "127.0.0.1"
    assert book.rendezvous(1, "127.0.0.2", timeout_s=0.0) == met


def test_a_node_is_known_by_its_address_on_the_way_to_the_first_node() -> None:
    assert own_address({"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}) == "127.0.0.1"
    assert own_address({"MAGISTRAL_ADDRESS": "10.0.0.9"}) == "10.0.0.9"
