"""One real SGLang server with a random two-layer model, shared by every test that needs one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_magistral.rollout.engine import EngineControl
from megatron_magistral.rollout.sglang_server import (
    ServerSettings,
    server_command,
    server_environment,
)

START_TIMEOUT_S = 300.0  # 15 s on an idle machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = pytest.importorskip("tests.rollout.models")  # imports transformers: slow
    path = tmp_path_factory.mktemp("model")
    models.random_model(seed=0).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerSettings]:
    settings = ServerSettings(
        model_dir=model_dir,
        port=free_port(),
        context_length=512,
        dtype="float32",
        max_total_tokens=16384,
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
    try:
        asyncio.run(_wait_ready(settings, process, log))
        yield settings
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _wait_ready(settings: ServerSettings, process: subprocess.Popen, log: Path) -> None:
    async with EngineControl(settings.url) as engine:
        ready = asyncio.create_task(engine.wait_ready(START_TIMEOUT_S))
        while not ready.done():
            await asyncio.wait([ready], timeout=1.0)
            if process.poll() is not None:
                ready.cancel()
                pytest.fail(f"SGLang ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        await ready
