"""Real SGLang servers with a random two-layer model; one is shared by all tests that need one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_magistral.cluster import free_ports
from megatron_magistral.rollout.engine import EngineControl
from megatron_magistral.rollout.sglang_server import (
    ServerSettings,
    server_command,
    server_environment,
)

START_TIMEOUT_S = 900.0  # 15 s on an idle machine, minutes on a busy one


@dataclass(frozen=True)
class Server:
    settings: ServerSettings
    process: subprocess.Popen

    def kill(self) -> None:
        """End the server with all its processes, as if the machine had lost power."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = pytest.importorskip("tests.rollout.models")  # imports transformers: slow
    path = tmp_path_factory.mktemp("model")
    models.random_model(seed=0).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def start_server(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[Server]]:
    """Starts a server; it is killed at the end of the context."""

    @contextmanager
    def start(
        tp: int = 1, port: int = 0, max_running_requests: int | None = None
    ) -> Iterator[Server]:
        settings = ServerSettings(
            model_dir=model_dir,
            port=port or free_ports(1)[0],
            context_length=512,
            tp=tp,
            dtype="float32",
            max_total_tokens=16384,
            max_running_requests=max_running_requests,
        )
        log = tmp_path_factory.mktemp("server") / "sglang.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                server_command(settings),
                env=server_environment(settings, os.environ),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(settings, process)
        try:
            asyncio.run(_wait_ready(settings, process, log))
            yield server
        finally:
            server.kill()

    return start


@pytest.fixture(scope="session")
def shared_server(
    start_server: Callable[..., AbstractContextManager[Server]],
) -> Iterator[Server]:
    with start_server() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> ServerSettings:
    return shared_server.settings


async def _wait_ready(settings: ServerSettings, process: subprocess.Popen, log: Path) -> None:
    async with EngineControl(settings.url) as engine:
        ready = asyncio.create_task(engine.wait_ready(START_TIMEOUT_S))
        while not ready.done():
            await asyncio.wait([ready], timeout=1.0)
            if process.poll() is not None:
                ready.cancel()
                pytest.fail(f"SGLang ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        await ready
