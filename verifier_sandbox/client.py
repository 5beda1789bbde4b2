"""The controller's side: many nodes, one answer, never an exception for a node's fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from verifier_sandbox.breaker import Breaker, BreakerState
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
_LOOK_S = 0.05  # between two looks for a free node


class VerifiersDown(RuntimeError):
    """No node has answered for so long that none can be expected to; names all of them."""


class _NodeFault(Exception):
    """This node did not answer as it should; another may."""


class _NodeAway(_NodeFault):
    """Nobody listens at its address: the request was not sent, and cannot be the cause."""


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
    breaker: Breaker
    num_in_flight: int = 0


class VerifierClient:
    """Sends each request to the least loaded healthy node, and to another if that one fails.

    A node that failed `breaker_faults` times in a row is left alone for `breaker_pause_s`, then
    tried with one request. When nodes have had `timeout_s` for a request, or failed it
    `max_attempts` times, or the service refuses it, the answer is Verdict.INFRASTRUCTURE
    (MathVerdict.INTERNAL) with the reason. Addresses: "unix:/path/to.sock" or "http://host:port".

    Waiting for a node costs a request nothing, whether all are busy, full, left alone or away. But
    if none answers anything for `outage_s`, VerifiersDown is raised.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float = 600.0,
        max_attempts: int = 4,
        breaker_faults: int = 3,
        breaker_pause_s: float = 10.0,
        outage_s: float = 600.0,
        max_connections_per_node: int = 256,
    ) -> None:
        if not addresses:
            raise ValueError("addresses: empty; must name at least one verifier service")
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._outage_s = outage_s
        self._max_in_flight = max_connections_per_node
        self._room = asyncio.Semaphore(max_connections_per_node * len(addresses))
        self._answered_at = time.monotonic()
        self._nodes = [
            _connect(address, Breaker(breaker_faults, breaker_pause_s), max_connections_per_node)
            for address in addresses
        ]

    def describe(self) -> str:
        """Every node, the state of its breaker and its last fault."""
        now = time.monotonic()
        nodes = ((node.address, node.breaker) for node in self._nodes)
        return "; ".join(f"{name} ({b.state(now)}): {b.last_fault or 'busy'}" for name, b in nodes)

    def metrics(self) -> dict[str, float]:
        """Of all nodes together: how many breakers are in which state, faults since the start."""
        now = time.monotonic()
        states = [node.breaker.state(now) for node in self._nodes]
        names = {state: state.value.replace("-", "_") for state in BreakerState}
        counts = {f"verifiers_{name}": float(states.count(state)) for state, name in names.items()}
        return counts | {
            "verifier_faults_total": float(sum(node.breaker.num_faults for node in self._nodes)),
            "verifiers_opened_total": float(sum(node.breaker.num_opened for node in self._nodes)),
            "verifier_requests": float(sum(node.num_in_flight for node in self._nodes)),
        }

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
        async with self._room:
            return await self._ask_nodes(path, body, kind, timeout_s)

    async def _ask_nodes(self, path: str, body: bytes, kind: type[_Model], left_s: float) -> _Model:
        failures: list[str] = []
        failed: set[str] = set()
        answer: _Model | None = None
        while len(failures) < self._max_attempts and left_s > 0:
            node = await self._pick(failed)
            begin = time.monotonic()
            try:
                answer = await self._post(node, path, body, kind, left_s)
            except _NodeFull as full:
                node.breaker.is_full(full.retry_after_s, time.monotonic())
                continue
            except _NodeAway as fault:
                failed.add(node.address)
                node.breaker.failed(str(fault), time.monotonic())
                continue
            except _NodeFault as fault:
                left_s -= time.monotonic() - begin
                failures.append(f"{node.address}: {fault}")
                failed.add(node.address)
                node.breaker.failed(str(fault), time.monotonic())
                continue
            left_s -= time.monotonic() - begin
            node.breaker.answered()
            self._answered_at = time.monotonic()
            if getattr(answer, "verdict", None) != Verdict.INFRASTRUCTURE:
                return answer
            failures.append(f"{node.address}: {getattr(answer, 'detail', '')}")
            failed.add(node.address)
        if answer is not None:
            return answer
        raise _NodeFault("; ".join(failures[-3:]))

    async def _pick(self, failed: Collection[str]) -> _Node:
        """Waits for a node that may be asked; the least loaded, rather one that has not failed
        this request. Raises VerifiersDown when no node answers anything meanwhile."""
        begin = time.monotonic()
        while True:
            now = time.monotonic()
            free = [node for node in self._nodes if self._is_free(node, now)]
            if free:
                return min(free, key=lambda n: (n.address in failed, n.num_in_flight))
            silent_s = now - max(begin, self._answered_at)
            if silent_s > self._outage_s:
                raise VerifiersDown(
                    f"no verifier has answered for {silent_s:.0f} s: {self.describe()}"
                )
            await asyncio.sleep(_LOOK_S)

    def _is_free(self, node: _Node, now: float) -> bool:
        has_room = node.num_in_flight < self._max_in_flight
        return has_room and node.breaker.lets_through(now, node.num_in_flight)

    async def _post(
        self, node: _Node, path: str, body: bytes, kind: type[_Model], timeout_s: float
    ) -> _Model:
        node.num_in_flight += 1
        timeout = httpx.Timeout(timeout_s + 5.0, connect=_CONNECT_TIMEOUT_S, pool=timeout_s)
        try:
            async with asyncio.timeout(timeout_s + 5.0):
                response = await node.http.post(path, content=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _NodeAway(f"{type(error).__name__}: {error}") from error
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


def _connect(address: str, breaker: Breaker, max_connections: int) -> _Node:
    headers = {"Content-Type": "application/json"}
    limits = httpx.Limits(max_connections=max_connections)
    if address.startswith("unix:"):
        transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix:"), limits=limits)
        http = httpx.AsyncClient(transport=transport, base_url="http://verifier", headers=headers)
    elif address.startswith(("http://", "https://")):
        http = httpx.AsyncClient(base_url=address, headers=headers, limits=limits, trust_env=False)
    else:
        raise ValueError(f"address {address!r}: must be unix:/path or http://host:port")
    return _Node(address, http, breaker)


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return max(0.1, float(response.headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0
