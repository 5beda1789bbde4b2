"""Requests to restart a process, as files that another process takes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from megatron_magistral.restart_requests import AskForRestart, RestartRequest, RestartRequests

ADDRESS = "127.0.0.1:30000"


def test_a_request_is_taken_once_as_it_was_asked(tmp_path: Path) -> None:
    request = RestartRequest(ADDRESS, silent_since=12.5, why="hangs")
    RestartRequests(tmp_path / "restarts").ask(request)
    requests = RestartRequests(tmp_path / "restarts")
    assert requests.take("127.0.0.1:30001") is None
    assert requests.take(ADDRESS) == request
    assert requests.take(ADDRESS) is None
    assert list((tmp_path / "restarts").iterdir()) == []


def test_the_newest_request_about_an_address_counts(tmp_path: Path) -> None:
    requests = RestartRequests(tmp_path)
    for since in (1.0, 2.0):
        requests.ask(RestartRequest(ADDRESS, since, "hangs"))
    request = requests.take(ADDRESS)
    assert request is not None and request.silent_since == 2.0


def test_each_request_is_seen_whole_and_by_one_supervisor(tmp_path: Path) -> None:
    """Two threads take while one asks; a half-written file would be logged and lost."""
    requests, number = RestartRequests(tmp_path), 200
    taken: list[RestartRequest] = []
    done = threading.Event()

    def take() -> None:
        while not done.is_set():
            if request := requests.take(ADDRESS):
                taken.append(request)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for index in range(number):
        while len(taken) < index:
            time.sleep(0)
        requests.ask(RestartRequest(ADDRESS, float(index), "w" * 5000))
    while len(taken) < number:
        time.sleep(0)
    done.set()
    for thread in threads:
        thread.join()
    assert [request.silent_since for request in taken] == [float(i) for i in range(number)]


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"address": 1}', b"\xff"])
def test_a_file_that_is_no_request_is_logged_and_removed(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"{ADDRESS}.json"
    path.write_bytes(content)
    assert RestartRequests(tmp_path).take(ADDRESS) is None
    assert f"{path}: is no request to restart" in caplog.text
    assert not path.exists()


def test_the_pool_asks_about_a_process_that_was_silent_so_long(tmp_path: Path) -> None:
    requests = RestartRequests(tmp_path)
    before = time.time()
    asyncio.run(AskForRestart(requests, silent_s=30.0)(ADDRESS))
    request = requests.take(ADDRESS)
    assert request is not None
    assert before - 30.0 <= request.silent_since <= time.time() - 30.0
    assert request.why == "gave no sign of life for 30 s"
