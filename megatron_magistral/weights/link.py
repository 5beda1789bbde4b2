"""A connection between the rank that controls an update and a leader of another pipeline stage.

Not a process group: a receive of such a group that runs into its bound breaks the group, and a rank
that died is not noticed before. Here a death is noticed at once, and every wait has a bound.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_TOKEN_BYTES = 16
_STAGE = struct.Struct("!I")
_HELLO_S = 5.0


class LinkLost(RuntimeError):
    """The other end is gone, or gives no sign in time."""


@dataclass(frozen=True)
class LinkAddress:
    """Where to connect to; who does not send `token` first is turned away."""

    host: str
    port: int
    token: bytes


class Link:
    """One end, for whole objects. They are pickled: both ends must be ranks of one run."""

    def __init__(self, connected: socket.socket, bound_s: float) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Of a message that has begun: the other end may be stopped in the middle of one.
        bound = struct.pack("@ll", max(1, round(bound_s)), 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        self._connection = Connection(connected.detach())

    def send(self, message: object) -> None:
        """Raises LinkLost."""
        try:
            self._connection.send(message)
        except OSError as error:
            raise LinkLost(f"connection broke: {error}") from error

    def poll(self, timeout_s: float) -> bool:
        """Whether `receive` would end at once: there is a message, or the other end is gone."""
        try:
            return self._connection.poll(timeout_s)
        except OSError:
            return True

    def receive(self, timeout_s: float) -> Any:
        """The next message. Raises LinkLost."""
        if not self.poll(timeout_s):
            raise LinkLost(f"no word within {timeout_s:g} s")
        try:
            return self._connection.recv()
        except EOFError as error:
            raise LinkLost("connection closed") from error
        except OSError as error:
            raise LinkLost(f"connection broke: {error}") from error

    def close(self) -> None:
        self._connection.close()

    def greet(self, token: bytes, stage: int) -> None:
        """Say who we are, before anything is unpickled."""
        self._connection.send_bytes(token + _STAGE.pack(stage))

    def greeting(self, token: bytes) -> int | None:
        """The stage of the other end, if it knows the token."""
        try:
            if not self._connection.poll(_HELLO_S):
                return None
            hello = self._connection.recv_bytes(_TOKEN_BYTES + _STAGE.size)
        except (EOFError, OSError):
            return None
        if not secrets.compare_digest(hello[:_TOKEN_BYTES], token):
            return None
        return int(_STAGE.unpack(hello[_TOKEN_BYTES:])[0])


class LinkServer:
    """The end that is connected to, reached by others at `host`."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server(("", 0))
        port = self._listener.getsockname()[1]
        self.address = LinkAddress(host, port, secrets.token_bytes(_TOKEN_BYTES))

    def accept(self, stages: int, timeout_s: float) -> dict[int, Link]:
        """Links to so many other stages, by stage. Raises LinkLost if one does not come."""
        deadline = time.monotonic() + timeout_s
        links: dict[int, Link] = {}
        while len(links) < stages:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connected, _ = self._listener.accept()
            except TimeoutError:
                there = ", ".join(map(str, sorted(links))) or "none"
                raise LinkLost(
                    f"{len(links)} of {stages} leaders of other pipeline stages connected within "
                    f"{timeout_s:g} s: {there}"
                ) from None
            link = Link(connected, timeout_s)
            stage = link.greeting(self.address.token)
            if stage is None:
                link.close()
            else:
                links[stage] = link
        return links

    def close(self) -> None:
        self._listener.close()


def connect_link(address: LinkAddress, stage: int, timeout_s: float) -> Link:
    """From the leader of `stage`. Raises LinkLost."""
    where = (address.host, address.port)
    try:
        link = Link(socket.create_connection(where, timeout_s), timeout_s)
        link.greet(address.token, stage)
    except OSError as error:
        raise LinkLost(f"no connection to {address.host}:{address.port}: {error}") from error
    return link
