"""Requests to restart a process of a run, as files: by who misses it, for who runs it.

    <folder>/<host>:<port>.json     a request, until it is taken

A process that has ended needs no request, its supervisor sees that by itself. One that hangs does:
only who asks it something can tell. Whoever supervises it, the launcher here or a batch script on a
cluster, takes the request, ends the process and starts it anew under the same address.

A request says since when the process has been silent. One that was started after that is not the
one that was missed: it is left alone.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestartRequest:
    """`address` is the host:port that the process serves, `silent_since` Unix time in seconds."""

    address: str
    silent_since: float
    why: str


class RestartRequests:
    """The requests of one run. A file appears whole or not at all; a newer request replaces it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(self, request: RestartRequest) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(request.address)
        half = path.with_suffix(f".{os.getpid()}.half")
        half.write_bytes(msgspec.json.encode(request))
        half.replace(path)

    def take(self, address: str) -> RestartRequest | None:
        """The request about `address`, which is gone then. One that cannot be read is logged."""
        path = self._path(address)
        taken = path.with_suffix(f".{os.getpid()}.taken")
        try:
            path.rename(taken)
        except FileNotFoundError:  # there is none, or another supervisor was faster
            return None
        content = taken.read_bytes()
        taken.unlink()
        try:
            return msgspec.json.decode(content, type=RestartRequest)
        except msgspec.DecodeError as error:
            log.warning("%s: is no request to restart: %s", path, error)
            return None

    def _path(self, address: str) -> Path:
        return self._folder / f"{address}.json"


class AskForRestart:
    """For the pool of engines: asks for a restart of one that has been silent for `silent_s`."""

    def __init__(self, requests: RestartRequests, silent_s: float) -> None:
        self._requests = requests
        self._silent_s = silent_s

    async def __call__(self, address: str) -> None:
        since = time.time() - self._silent_s
        why = f"gave no sign of life for {self._silent_s:g} s"
        self._requests.ask(RestartRequest(address, since, why))
