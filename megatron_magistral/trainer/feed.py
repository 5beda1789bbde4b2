"""The trainer's end of the controller's desk (rollout/desk.py). Blocking, every wait bounded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum

import httpx
import msgspec

from megatron_magistral.types import Batch, Progress

REQUEST_TIMEOUT_S = 60.0
READY_POLL_S = 0.25


class Instead(StrEnum):
    """What a rank is to do before it gets a batch; all ranks are told the same of a step."""

    PUBLISH = "publish the present weights once more"
    STOP = "save and end"


class FeedError(RuntimeError):
    """The controller did not answer, or refused; says what was asked and after how long."""


class Feed:
    def __init__(self, url: str, *, batch_timeout_s: float) -> None:
        self._client = httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S)
        self._batch_timeout_s = batch_timeout_s

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the controller answers: then it has seen every generator ready."""
        begin = time.monotonic()
        while True:
            try:
                self._client.get("/")
                return
            except httpx.TransportError as error:
                after_s = time.monotonic() - begin
                if after_s > timeout_s:
                    raise FeedError(
                        f"controller: does not answer after {after_s:.0f} s: {error}"
                    ) from error
            time.sleep(READY_POLL_S)

    def start(self, progress: Progress) -> None:
        """Say where the stage goes on, before the first weights; returns when the controller has
        found what belongs to it."""
        path = f"/start?attempt={secrets.token_hex(8)}"
        begin = time.monotonic()
        while time.monotonic() - begin < self._batch_timeout_s:
            response = self._request("POST", path, msgspec.json.encode(progress))
            if response.status_code == httpx.codes.NO_CONTENT:
                return
        raise FeedError(
            f"controller: not ready to go on from step {progress.next_step} "
            f"after {self._batch_timeout_s:.0f} s"
        )

    def pull(self, step: int, data_rank: int, num_updates: int = 0) -> Batch | Instead:
        """Wait for this data-parallel rank's share of `step`, or what it is to do instead.

        `num_updates` is how often it was told to publish in this step, and did. Raises FeedError,
        with what the controller waits for, after the bound.
        """
        path = f"/steps/{step}/shares/{data_rank}?updates={num_updates}"
        begin = time.monotonic()
        waiting_for = ""
        while time.monotonic() - begin < self._batch_timeout_s:
            response = self._request("GET", path)
            match response.status_code:
                case httpx.codes.OK:
                    return msgspec.msgpack.decode(response.content, type=Batch)
                case httpx.codes.RESET_CONTENT:
                    return Instead.PUBLISH
                case httpx.codes.GONE:
                    return Instead.STOP
            waiting_for = response.headers.get("Waiting-For", "")
        raise FeedError(
            f"controller: no batch for step {step} after {self._batch_timeout_s:.0f} s: "
            f"{waiting_for}"
        )

    def begin_update(self, version: int) -> list[str]:
        """An update to `version` begins; the engines that it is to leave out, for they are being
        evaluated with the version that they have."""
        response = self._request("PUT", f"/weights/{version}")
        return msgspec.json.decode(response.content, type=list[str])

    def end_update(self, version: int, engines: Sequence[str] | None = None) -> None:
        """`engines` serve `version` now, others must get no requests; None: all of them do."""
        body = None if engines is None else msgspec.json.encode(list(engines))
        self._request("POST", f"/weights/{version}", body)

    def acknowledge(self, step: int, metrics: Mapping[str, float]) -> None:
        self._request("POST", f"/steps/{step}/trained", msgspec.json.encode(dict(metrics)))

    def close(self) -> None:
        self._client.close()

    def _request(self, method: str, path: str, body: bytes | None = None) -> httpx.Response:
        begin = time.monotonic()
        try:
            response = self._client.request(method, path, content=body)
        except httpx.HTTPError as error:
            after_s = time.monotonic() - begin
            raise FeedError(
                f"controller: {method} {path} failed after {after_s:.1f} s: "
                f"{type(error).__name__} {error}"
            ) from error
        if response.is_error and response.status_code != httpx.codes.GONE:
            raise FeedError(
                f"controller: {method} {path} answered {response.status_code}: {response.text}"
            )
        return response
