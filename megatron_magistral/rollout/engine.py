"""Control of one SGLang server over HTTP: readiness, weight updates.

Every call has a bound and fails with an `EngineError` that names the engine, the phase and the
seconds spent. Control calls go to each server itself: a router in front answers 404 to them.

A weight update is, in this order and only this one:

    pause (in place) -> begin -> update_bucket (once per bucket) -> checksums -> stamp (version)
    -> end -> resume
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from megatron_magistral.rollout.sglang_plugin import ACTION_PREFIX, STATE_KEY
from megatron_magistral.rollout.sglang_server import VersionSupport, sglang_version_status

log = logging.getLogger(__name__)

UNKNOWN_VERSION = -1  # weights loaded from disk: SGLang calls their version "default"


# Below the 5 s after which the server closes an idle connection: a request sent on a connection
# that is just being closed looks like a dead server.
KEEPALIVE_S = 3.0

# Of one attempt to get a sign of life.
SIGN_OF_LIFE_S = 5.0


class Phase(StrEnum):
    """What was asked of an engine when it failed."""

    READY = "wait until ready"
    INFO = "server info"
    GENERATE = "generate"
    JOIN = "join update group"
    LEAVE = "leave update group"
    MANIFEST = "compare manifest"
    PAUSE = "pause"
    BEGIN = "begin update"
    TRANSFER = "transfer bucket"
    CHECKSUM = "compare checksums"
    STAMP = "set version"
    END = "end update"
    RESUME = "resume"
    PROBE = "score probe"
    LOAD = "load a model"


class EngineError(RuntimeError):
    """One engine failed in one phase. Subclasses say how."""

    def __init__(self, engine: str, phase: Phase, elapsed_s: float, detail: str) -> None:
        super().__init__(f"engine {engine}: {phase} failed after {elapsed_s:.2f} s: {detail}")
        self.engine = engine
        self.phase = phase
        self.elapsed_s = elapsed_s
        self.detail = detail


class EngineUnreachable(EngineError):
    """No connection, or it broke: the server is dead or the network is."""


class EngineTimeout(EngineError):
    """The server did not answer within the bound of the phase."""


class EngineRefused(EngineError):
    """The server answered, and said no or something we cannot read."""


class EngineMismatch(EngineError):
    """The server's weights are not what they must be; the detail names the tensors."""


@dataclass(frozen=True)
class ControlTimeouts:
    """Bounds of the control calls in seconds; `transfer_s` is that of one bucket."""

    info_s: float = 20.0
    join_s: float = 120.0
    pause_s: float = 30.0
    begin_s: float = 60.0
    transfer_s: float = 120.0
    checksum_s: float = 60.0
    probe_s: float = 60.0
    end_s: float = 60.0
    resume_s: float = 30.0


@dataclass(frozen=True)
class UpdateGroup:
    """A process group for weights: rank 0 the trainer, engine ranks from 1 on."""

    name: str
    host: str
    port: int
    world_size: int
    backend: str


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype (as in `torch.<dtype>`) of one tensor in Hugging Face naming."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def server_name(url: str) -> str:
    """What an engine is called that has no name of its own."""
    return url.removeprefix("http://").rstrip("/")


def parse_version(version: str) -> int:
    """SGLang's version string as our integer.

    Raises:
        ValueError: a string that we never set.
    """
    if version == "default":
        return UNKNOWN_VERSION
    try:
        return int(version)
    except ValueError:
        raise ValueError(f"weight version {version!r}: expected an integer") from None


class EngineControl:
    """Async client of the control endpoints of one server. Use it within one event loop."""

    def __init__(
        self, url: str, *, name: str | None = None, timeouts: ControlTimeouts | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name or server_name(url)
        self.timeouts = timeouts or ControlTimeouts()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connection pool, made inside the running loop. No limit: SGLang queues requests."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    async def wait_ready(self, timeout_s: float, *, poll_s: float = 0.25) -> None:
        """Wait until the server gives a sign of life.

        Raises:
            EngineTimeout: none in time; the detail is what the last attempt met.
        """
        start = time.monotonic()
        while True:
            try:
                await self.give_sign_of_life(min(timeout_s, SIGN_OF_LIFE_S))
                return
            except EngineError as error:
                elapsed_s = time.monotonic() - start
                if elapsed_s + poll_s > timeout_s:
                    raise EngineTimeout(self.name, Phase.READY, elapsed_s, error.detail) from error
            await asyncio.sleep(poll_s)

    async def give_sign_of_life(self, timeout_s: float) -> None:
        """Ask the server's HTTP process whether the server has started; it does not look further.

        Raises:
            EngineError: it has not, or does not answer in time.
        """
        await self._call(Phase.READY, "GET", "/health", None, timeout_s)

    async def load_model(self, directory: Path, version: int, timeout_s: float) -> None:
        """Replace the weights by those of a model directory of the same shape, as `version`.

        Raises:
            EngineRefused: the server could not, and says why.
        """
        start = time.monotonic()
        payload = {"model_path": str(directory), "weight_version": str(version)}
        path = "/update_weights_from_disk"
        answer = await self._call(Phase.LOAD, "POST", path, payload, timeout_s)
        if not answer.get("success"):
            raise self._refused(Phase.LOAD, start, f"{directory}: {answer.get('message', answer)}")

    async def server_info(self) -> dict[str, Any]:
        """The resolved arguments, SGLang's version and the scheduler's internal state."""
        return await self._call(Phase.INFO, "GET", "/server_info", None, self.timeouts.info_s)

    async def kv_cache_tokens(self) -> int:
        """What the server's KV cache holds.

        Raises:
            EngineRefused: the server does not say.
        """
        start = time.monotonic()
        info = await self.server_info()
        if "max_total_num_tokens" not in info:
            raise self._refused(Phase.INFO, start, "no max_total_num_tokens in /server_info")
        return int(info["max_total_num_tokens"])

    async def weight_version(self) -> int:
        """Version of the weights that the server holds; -1 for those it loaded from disk."""
        start = time.monotonic()
        info = await self._call(Phase.INFO, "GET", "/model_info", None, self.timeouts.info_s)
        try:
            return parse_version(info["weight_version"])
        except ValueError as error:
            raise self._refused(Phase.INFO, start, str(error)) from error

    async def check_server(self) -> None:
        """Check that the server is an SGLang that we know how to update, with our plugin in it.

        Raises:
            EngineRefused: it is too old, or our plugin's hooks are not active.
        """
        start = time.monotonic()
        info = await self.server_info()
        status = sglang_version_status(info.get("version", "0"))
        if status.support is VersionSupport.TOO_OLD:
            raise self._refused(Phase.INFO, start, status.message)
        if status.support is VersionSupport.UNTESTED:
            log.warning("engine %s: %s", self.name, status.message)
        states = info.get("internal_states") or [{}]
        if not all(state.get(STATE_KEY, {}).get("active") for state in states):
            raise self._refused(
                Phase.INFO,
                start,
                "the `magistral` plugin is not active in it: install megatron-magistral in "
                "SGLang's environment, and see its log for why the plugin did not load",
            )

    async def join_update_group(self, group: UpdateGroup, rank_offset: int) -> None:
        """Make the server's ranks join at `rank_offset`; answers when the group is complete."""
        payload = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        timeout_s = self.timeouts.join_s
        await self.post(Phase.JOIN, "/init_weights_update_group", payload, timeout_s)

    async def leave_update_group(self, group_name: str) -> None:
        payload = {"group_name": group_name}
        timeout_s = self.timeouts.join_s
        await self.post(Phase.LEAVE, "/destroy_weights_update_group", payload, timeout_s)

    async def pause(self) -> None:
        """Stop generating and keep every request with its KV cache where it is.

        The server acknowledges before its scheduler has stopped; `begin_update` waits for that.
        """
        payload = {"mode": "in_place"}  # SGLang's default mode aborts every request
        await self.post(Phase.PAUSE, "/pause_generation", payload, self.timeouts.pause_s)

    async def begin_update(self) -> None:
        """Open an update session; answers when no forward pass is running on any rank."""
        timeout_s = self.timeouts.begin_s
        await self.post(Phase.BEGIN, "/begin_weight_update", {}, timeout_s)

    async def update_bucket(self, specs: Sequence[TensorSpec], group_name: str) -> None:
        """Receive one flattened bucket from rank 0 of the group and load it.

        Must run while rank 0 broadcasts the bytes of `specs`, concatenated in this order.
        """
        payload = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [spec.shape for spec in specs],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # a flush with live requests fails the call after the load
        }
        timeout_s = self.timeouts.transfer_s
        await self.post(Phase.TRANSFER, "/update_weights_from_distributed", payload, timeout_s)

    async def ask_about_weights(
        self, phase: Phase, question: dict[str, Any], timeout_s: float
    ) -> list[Any]:
        """Our plugin's answers to `question` (sglang_answers.py), one of each rank."""
        start = time.monotonic()
        payload = {"action": ACTION_PREFIX + msgspec.json.encode(question).decode()}
        reply = await self.post(phase, "/weights_checker", payload, timeout_s)
        try:
            return msgspec.json.decode(reply["message"])
        except (msgspec.DecodeError, KeyError) as error:
            raise self._refused(phase, start, f"the plugin's answer is no JSON: {error}") from error

    async def stamp(self, version: int) -> None:
        """Name the loaded weights. After the last bucket only: partial weights have no version."""
        payload = {"new_version": str(version), "abort_all_requests": False}
        await self.post(Phase.STAMP, "/update_weight_version", payload, self.timeouts.end_s)

    async def end_update(self) -> None:
        await self.post(Phase.END, "/end_weight_update", {}, self.timeouts.end_s)

    async def abandon_update(self) -> None:
        """Close the session that a failed update left open, if any. The engine stays paused."""
        with contextlib.suppress(EngineRefused):  # how SGLang says that no session is open
            await self.end_update()

    async def resume(self) -> None:
        """Continue every paused request on its old KV cache."""
        payload = {"torch_empty_cache": False}
        await self.post(Phase.RESUME, "/continue_generation", payload, self.timeouts.resume_s)

    async def post(
        self, phase: Phase, path: str, payload: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """POST `payload` as JSON and return the answer, which must not be a refusal."""
        start = time.monotonic()
        answer = await self._call(phase, "POST", path, payload, timeout_s)
        if answer.get("success") is False:
            raise self._refused(phase, start, str(answer.get("message")))
        return answer

    async def _call(
        self, phase: Phase, method: str, path: str, payload: object, timeout_s: float
    ) -> Any:
        """One HTTP exchange with a JSON (or empty) answer."""
        start = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        body = None if payload is None else msgspec.json.encode(payload)
        headers = {"Content-Type": "application/json"}
        try:
            async with self.session.request(
                method, self.url + path, data=body, headers=headers, timeout=timeout
            ) as response:
                content = await response.read()
        except TimeoutError as error:
            detail = f"no answer within {timeout_s:g} s"
            raise EngineTimeout(self.name, phase, time.monotonic() - start, detail) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(phase, start, error) from error
        if response.status != 200:
            detail = f"HTTP {response.status}: {content[:500].decode(errors='replace')}"
            raise self._refused(phase, start, detail)
        try:
            return msgspec.json.decode(content) if content else {}
        except msgspec.DecodeError as error:
            raise self._refused(phase, start, f"{path} answered no JSON: {error}") from error

    def _unreachable(self, phase: Phase, start: float, error: Exception) -> EngineUnreachable:
        detail = f"{type(error).__name__}: {error}"
        return EngineUnreachable(self.name, phase, time.monotonic() - start, detail)

    def _refused(self, phase: Phase, start: float, detail: str) -> EngineRefused:
        return EngineRefused(self.name, phase, time.monotonic() - start, detail)
