"""The controller's side: many nodes, one answer, never an exception for a node's fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from verifier_sandbox.judge.draw import draw
from verifier_sandbox.mathcheck.result import MathResult, MathVerdict
from verifier_sandbox.protocol import (
    JudgeRequest,
    JudgeResult,
    MathAnswer,
    MathRequest,
    Verdict,
    infrastructure,
)

_Model = TypeVar("_Model", bound=BaseModel)
_CONNECT_TIMEOUT_S = 10.0
_MAX_PAUSE_S = 10.0


class _NodeFault(Exception):
    """This node did not answer as it should; another may."""


class _Refused(Exception):
    """The request itself is at fault; another node would say the same."""


class _NodeFull(Exception):
    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"full, retry after {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


@dataclass
class _Node:
    """One service and what we know of its health."""

    address: str
    http: httpx.AsyncClient
    num_in_flight: int = 0
    num_faults_in_a_row: int = 0
    closed_until: float = 0.0
    """Asked again at this monotonic time, after faults or a full queue."""
    last_fault: str = field(default="", compare=False)


class VerifierClient:
    """Sends each request to the least loaded healthy node, and to another if that one fails.

    A node that failed `breaker_faults` times in a row is left alone for `breaker_pause_s`, then
    tried with one request. When nobody can answer within `timeout_s`, or the service refuses the
    request itself, the answer is Verdict.INFRASTRUCTURE (MathVerdict.INTERNAL) with the reason.
    Addresses: "unix:/path/to.sock" or "http://host:port".
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float = 600.0,
        max_attempts: int = 4,
        breaker_faults: int = 3,
        breaker_pause_s: float = 10.0,
        max_connections_per_node: int = 256,
    ) -> None:
        if not addresses:
            raise ValueError("addresses: empty; must name at least one verifier service")
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._breaker_faults = breaker_faults
        self._breaker_pause_s = breaker_pause_s
        self._nodes = [_connect(address, max_connections_per_node) for address in addresses]

    async def judge(self, request: JudgeRequest) -> JudgeResult:
        """The verdict of some node. Tests are drawn here, so that only those travel."""
        ids, tests = draw(request)
        deadline_s = min(request.deadline_s or self._timeout_s, self._timeout_s)
        update = {"tests": list(tests), "test_ids": list(ids), "deadline_s": deadline_s}
        request = request.model_copy(update=update)
        try:
            return await self._ask("/v1/judge", request, JudgeResult, deadline_s)
        except (_NodeFault, _Refused) as fault:
            return infrastructure(str(fault), test_ids=list(ids), num_tests=len(ids))

    async def check_maths(self, reference: str, response: str) -> MathResult:
        """Whether the response's answer equals the reference; INTERNAL when nobody could tell."""
        request = MathRequest(reference=reference, response=response)
        try:
            answer = await self._ask("/v1/maths", request, MathAnswer, self._timeout_s)
        except (_NodeFault, _Refused) as fault:
            return MathResult(MathVerdict.INTERNAL, str(fault))
        return MathResult(MathVerdict(answer.verdict), answer.reason)

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once every node is healthy. Raises TimeoutError naming those that are not."""
        end = time.monotonic() + timeout_s
        waiting = list(self._nodes)
        while waiting:
            healthy = await asyncio.gather(*map(_is_healthy, waiting))
            waiting = [node for node, is_up in zip(waiting, healthy, strict=True) if not is_up]
            if waiting and time.monotonic() > end:
                names = ", ".join(node.address for node in waiting)
                raise TimeoutError(f"verifiers not ready after {timeout_s:.0f} s: {names}")
            await asyncio.sleep(0.1 if waiting else 0)

    async def close(self) -> None:
        await asyncio.gather(*(node.http.aclose() for node in self._nodes))

    async def _ask(
        self, path: str, request: BaseModel, kind: type[_Model], timeout_s: float
    ) -> _Model:
        """Raises _NodeFault when attempts or time are used up, _Refused when told so."""
        body = _encode(request)
        end = time.monotonic() + timeout_s
        failures: list[str] = []
        failed: set[str] = set()
        answer: _Model | None = None
        while len(failures) < self._max_attempts:
            node = await self._pick(end, failed)
            left_s = end - time.monotonic()
            if node is None or left_s <= 0:
                failures.append(f"no node free within {timeout_s:.0f} s")
                break
            try:
                answer = await self._post(node, path, body, kind, left_s)
            except _NodeFull as full:
                node.closed_until = time.monotonic() + min(full.retry_after_s, _MAX_PAUSE_S)
                continue
            except _NodeFault as fault:
                failures.append(f"{node.address}: {fault}")
                failed.add(node.address)
                self._note_fault(node, str(fault))
                continue
            node.num_faults_in_a_row = 0
            if getattr(answer, "verdict", None) != Verdict.INFRASTRUCTURE:
                return answer
            failures.append(f"{node.address}: {getattr(answer, 'detail', '')}")
            failed.add(node.address)
        if answer is not None:
            return answer
        raise _NodeFault("; ".join(failures[-3:]))

    async def _pick(self, end: float, failed: Collection[str]) -> _Node | None:
        """The least loaded open node, rather one that has not failed this request.

        Waits for a node to reopen; None when time is up.
        """
        while (now := time.monotonic()) < end:
            open_nodes = [node for node in self._nodes if self._is_open(node, now)]
            if open_nodes:
                return min(open_nodes, key=lambda n: (n.address in failed, n.num_in_flight))
            reopens = min(node.closed_until for node in self._nodes)
            await asyncio.sleep(min(max(reopens - now, 0.01), end - now, 1.0))
        return None

    def _is_open(self, node: _Node, now: float) -> bool:
        if now < node.closed_until:
            return False
        is_on_trial = node.num_faults_in_a_row >= self._breaker_faults
        return not is_on_trial or node.num_in_flight == 0

    def _note_fault(self, node: _Node, reason: str) -> None:
        node.num_faults_in_a_row += 1
        node.last_fault = reason
        if node.num_faults_in_a_row >= self._breaker_faults:
            node.closed_until = time.monotonic() + self._breaker_pause_s
        else:  # a moment for the others to be chosen first
            node.closed_until = time.monotonic() + 0.1 * 2**node.num_faults_in_a_row

    async def _post(
        self, node: _Node, path: str, body: bytes, kind: type[_Model], timeout_s: float
    ) -> _Model:
        node.num_in_flight += 1
        timeout = httpx.Timeout(timeout_s + 5.0, connect=_CONNECT_TIMEOUT_S, pool=timeout_s)
        try:
            async with asyncio.timeout(timeout_s + 5.0):
                response = await node.http.post(path, content=body, timeout=timeout)
        except (httpx.HTTPError, TimeoutError) as error:
            raise _NodeFault(f"{type(error).__name__}: {error}") from error
        finally:
            node.num_in_flight -= 1
        if response.status_code == 429:
            raise _NodeFull(_retry_after_s(response))
        if response.status_code == 422:
            raise _Refused(f"refused: {response.text[:500]}")
        if response.status_code != 200:
            raise _NodeFault(f"HTTP {response.status_code}: {response.text[:200]}")
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise _NodeFault(f"unreadable answer: {error}") from error


def _encode(request: BaseModel) -> bytes:
    """Raises _Refused for text in the problem's own parts that no encoding can carry."""
    try:
        return request.model_dump_json().encode()
    except PydanticSerializationError as error:
        raise _Refused(f"request cannot be sent as JSON: {error}") from error


async def _is_healthy(node: _Node) -> bool:
    try:
        return (await node.http.get("/healthz", timeout=_CONNECT_TIMEOUT_S)).status_code == 200
    except httpx.HTTPError:
        return False


def _connect(address: str, max_connections: int) -> _Node:
    headers = {"Content-Type": "application/json"}
    limits = httpx.Limits(max_connections=max_connections)
    if address.startswith("unix:"):
        transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix:"), limits=limits)
        http = httpx.AsyncClient(transport=transport, base_url="http://verifier", headers=headers)
    elif address.startswith(("http://", "https://")):
        http = httpx.AsyncClient(base_url=address, headers=headers, limits=limits, trust_env=False)
    else:
        raise ValueError(f"address {address!r}: must be unix:/path or http://host:port")
    return _Node(address, http)


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return max(0.1, float(response.headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0
