"""The HTTP service of one node: POST /v1/judge and /v1/maths, GET /healthz and /metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError

from verifier_sandbox.judge.judge import BadRequestError
from verifier_sandbox.mathcheck.pool import MathPool
from verifier_sandbox.metrics import Metrics
from verifier_sandbox.pool import OverloadedError
from verifier_sandbox.protocol import JudgeRequest, JudgeResult, MathAnswer, MathRequest
from verifier_sandbox.service import Service, describe, running

log = logging.getLogger(__name__)

_SHUTDOWN_GRACE_S = 5
_PARENT_CHECK_S = 0.5


@dataclass(frozen=True)
class ServerSettings:
    """Where the service listens and how much it takes on."""

    socket: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8900
    num_slots: int | None = None
    num_maths_workers: int = 1
    max_queue: int | None = None
    use_slot_uids: bool = True
    outlive_parent: bool = False


def create_app(settings: ServerSettings) -> FastAPI:
    """The application; its lifespan starts and ends the pools."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        judging = running(settings.num_slots, settings.max_queue, settings.use_slot_uids)
        async with judging as service, MathPool(settings.num_maths_workers) as maths:
            app.state.service, app.state.maths = service, maths
            app.state.metrics = Metrics(service)
            yield

    app = FastAPI(title="verifier_sandbox", lifespan=lifespan, openapi_url=None)
    app.add_api_route("/v1/judge", _judge, methods=["POST"])
    app.add_api_route("/v1/maths", _maths, methods=["POST"])
    app.add_api_route("/healthz", _healthz, methods=["GET"])
    app.add_api_route("/metrics", _metrics, methods=["GET"])
    return app


async def _judge(http: Request) -> Response:
    service: Service = http.app.state.service
    metrics: Metrics = http.app.state.metrics
    begin = time.monotonic()
    try:
        request = JudgeRequest.model_validate_json(await http.body())
        with service.pool.admission():
            result = await service.judge.judge(request)
    except OverloadedError as error:
        metrics.rejected()
        headers = {"Retry-After": f"{error.retry_after_s:.0f}"}
        return _error(429, str(error), headers)
    except (ValidationError, BadRequestError) as error:
        return _error(422, str(error))
    wall_s = time.monotonic() - begin
    metrics.judged(request, result, wall_s)
    _log_judged(request, result, wall_s)
    return _answer(result)


async def _maths(http: Request) -> Response:
    maths: MathPool = http.app.state.maths
    try:
        request = MathRequest.model_validate_json(await http.body())
    except ValidationError as error:
        return _error(422, str(error))
    result = await maths.check(request.reference, request.response)
    http.app.state.metrics.checked_maths(result.verdict.value)
    return _answer(MathAnswer(verdict=result.verdict.value, reason=result.reason))


async def _healthz(http: Request) -> dict[str, object]:
    service: Service = http.app.state.service
    interpreter = service.jail.interpreter
    return {
        "status": "ok",
        "isolation": describe(service.jail.machine),
        "python": str(interpreter.executable) if interpreter else None,
        "compiler": service.jail.toolchain.version,
        "num_slots": service.pool.num_slots,
        "num_busy": service.pool.num_busy,
        "num_waiting": service.pool.num_waiting,
        "num_unfinished": service.pool.num_unfinished,
    }


async def _metrics(http: Request) -> Response:
    return Response(http.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _answer(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


def _error(status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps({"detail": detail})
    return Response(body, status, headers, media_type="application/json")


def _log_judged(request: JudgeRequest, result: JudgeResult, wall_s: float) -> None:
    """One JSON object a submission: never the source or a test."""
    record = {
        "event": "judged",
        "problem_id": request.problem_id,
        "group": request.group,
        "language": request.language.value,
        "verdict": result.verdict.value,
        "num_passed": result.num_passed,
        "num_tests": result.num_tests,
        "cpu_ms": round(sum(test.cpu_ms for test in result.per_test), 3),
        "compile_cpu_ms": result.compile and round(result.compile.cpu_ms, 3),
        "wall_ms": round(wall_s * 1e3, 3),
        "num_reruns": result.num_reruns,
        "num_retries": result.num_retries,
        "detail": result.detail,
    }
    log.info("%s", json.dumps(record, ensure_ascii=False))


class _Server(uvicorn.Server):
    """Stops when its parent goes, so that no service outlives the run that it belongs to.

    uvicorn lets everybody connect to a unix socket that it makes, so this one is ours.
    """

    def __init__(self, config: uvicorn.Config, parent: int | None, path: Path | None) -> None:
        super().__init__(config)
        self._parent = parent
        self._path = path
        self._not_ready = None if path is None else path.with_name(f".{os.getpid()}")

    def serve_forever(self) -> None:
        """At `path`, which appears when the pools are ready, or at the config's host and port."""
        if self._not_ready is None:
            self.run()
            return
        try:
            self.run([_private_socket(self._not_ready)])
        finally:
            self._not_ready.unlink(missing_ok=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._path is not None and self._not_ready is not None:
            self._not_ready.replace(self._path)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._path is not None:  # here, as the end of `run` raises the signal again
            self._path.unlink(missing_ok=True)

    async def main_loop(self) -> None:
        watch = asyncio.create_task(self._watch_parent())
        try:
            await super().main_loop()
        finally:
            watch.cancel()

    async def _watch_parent(self) -> None:
        while self._parent is not None and not self.should_exit:
            if os.getppid() != self._parent:
                log.warning("parent %d has gone: stopping", self._parent)
                self.should_exit = True
            await asyncio.sleep(_PARENT_CHECK_S)


def serve(settings: ServerSettings) -> None:
    """Serves until SIGTERM, SIGINT or the end of the parent; leaves nothing running.

    Raises IsolationError or BuildError if this machine cannot judge.
    """
    parent = None if settings.outlive_parent else os.getppid()
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
    )
    server = _Server(config, parent, settings.socket)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        log.info("stopped by %s", signal.SIGINT.name)
    if not server.started:
        raise SystemExit(3)


def _private_socket(path: Path) -> socket.socket:
    """A socket to which only its owner can connect."""
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(mask)
    return listener
