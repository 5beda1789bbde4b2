"""One running judge for all tests of this directory, driven from plain functions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import pytest

from verifier_sandbox.protocol import JudgeRequest, JudgeResult, Test
from verifier_sandbox.service import Service, running

T = TypeVar("T")
WAIT_S = 300


class Bench:
    """A service on an event loop of its own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, service: Service) -> None:
        self._loop = loop
        self.service = service

    def await_(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return self.await_(run())

    def judge(self, request: JudgeRequest) -> JudgeResult:
        return self.await_(self.service.judge.judge(request))

    def judge_all(self, requests: Iterable[JudgeRequest]) -> list[JudgeResult]:
        async def run() -> list[JudgeResult]:
            return await asyncio.gather(*map(self.service.judge.judge, requests))

        return self.await_(run())


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    ready: threading.Event = threading.Event()
    box: dict[str, Any] = {}

    async def live() -> None:
        try:
            async with running(num_slots=2) as service:
                box["stop"] = asyncio.Event()
                box["bench"] = Bench(asyncio.get_running_loop(), service)
                ready.set()
                await box["stop"].wait()
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert ready.wait(WAIT_S), f"no service after {WAIT_S} s"
    bench: Bench = box["bench"]
    yield bench
    bench.call(box["stop"].set)
    thread.join(WAIT_S)


def request(source: str, tests: Iterable[tuple[str, str]] = (("", "safe"),), **fields: Any):
    """A request with the parts that a test does not care about filled in."""
    fields = {"language": "python", "problem_id": "problem", "group": "group", **fields}
    return JudgeRequest(source=source, tests=[Test(*test) for test in tests], **fields)
