"""The plugin's hooks without SGLang: keys of the prefix cache, and whether they are in place."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_magistral.rollout import sglang_plugin
from megatron_magistral.rollout.sglang_plugin import (
    HOOKED,
    cache_key,
    is_active,
    mark_request,
    prepare_update,
)


def request(key: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(extra_key=key)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's scheduler, before the first update."""
    monkeypatch.setattr(sglang_plugin, "_num_updates", 0)
    return SimpleNamespace(waiting_queue=[])


def arrive(scheduler: SimpleNamespace, key: str | None = None) -> SimpleNamespace:
    new = request(key)
    mark_request(scheduler, new)
    scheduler.waiting_queue.append(new)
    return new


def begin_update(scheduler: SimpleNamespace) -> None:
    prepare_update(SimpleNamespace(scheduler=scheduler), object())


@pytest.mark.parametrize("key", [None, "", "v1", "a|b", "weights=|", "weights=x|y"])
def test_a_key_keeps_what_the_request_came_with_behind_the_number(key: str | None) -> None:
    assert cache_key(key, 3) == f"weights=3|{key or ''}"


def test_a_key_is_renumbered_and_grows_no_longer() -> None:
    assert cache_key(cache_key(cache_key("lora", 1), 1), 12) == cache_key("lora", 12)


def test_keys_of_different_numbers_never_meet() -> None:
    keys = {cache_key(key, number) for key in ("", "1", "weights=2|") for number in range(20)}
    assert len(keys) == 2 * 20  # a mark that a request brings along is not its own


def test_requests_before_and_after_an_update_share_nothing(scheduler: SimpleNamespace) -> None:
    begun = arrive(scheduler, "v1")
    scheduler.waiting_queue.clear()
    begin_update(scheduler)
    assert arrive(scheduler, "v1").extra_key != begun.extra_key


def test_a_request_that_waits_through_updates_is_like_one_that_came_after_them(
    scheduler: SimpleNamespace,
) -> None:
    waiting = [arrive(scheduler, "v1"), arrive(scheduler)]
    for _ in range(2):
        begin_update(scheduler)
    assert [r.extra_key for r in waiting] == [
        arrive(scheduler, "v1").extra_key,
        arrive(scheduler).extra_key,
    ]


def test_a_running_request_keeps_its_key_until_it_is_retracted(scheduler: SimpleNamespace) -> None:
    running = arrive(scheduler)
    before = running.extra_key
    scheduler.waiting_queue.clear()
    begin_update(scheduler)
    assert running.extra_key == before
    mark_request(scheduler, running, is_retracted=True)
    assert running.extra_key == arrive(scheduler).extra_key


def test_both_streams_are_synchronised_before_an_update(scheduler: SimpleNamespace) -> None:
    done: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.synchronize = lambda: done.append(name)

    scheduler.forward_stream, scheduler.schedule_stream = Stream("forward"), Stream("schedule")
    begin_update(scheduler)
    assert done == ["forward", "schedule"]


@pytest.mark.parametrize("missing", [None, *HOOKED])
def test_the_plugin_is_active_only_with_every_hook_in_place(
    missing: tuple[str, str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def original(*args: Any) -> None: ...

    def wrapper(*args: Any) -> None: ...

    wrapper.__wrapped__ = original  # type: ignore[attr-defined]
    for module, kind, name in HOOKED:
        if module not in sys.modules or not hasattr(sys.modules[module], kind):
            fake = ModuleType(module)
            setattr(fake, kind, type(kind, (), {}))
            monkeypatch.setitem(sys.modules, module, fake)
        hooked = original if (module, kind, name) == missing else wrapper
        monkeypatch.setattr(getattr(sys.modules[module], kind), name, hooked, raising=False)
    assert is_active() is (missing is None)
