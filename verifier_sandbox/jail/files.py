"""Sealed memory files: how sources, binaries, inputs and expected outputs reach the launcher.

Nothing a program could look for ever lies on disk.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterable
from types import TracebackType

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class SealedFile:
    """An immutable file in memory, closed by `close`, at the end of a `with`, or when forgotten."""

    def __init__(self, pieces: Iterable[bytes], name: str = "sealed") -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._closer = weakref.finalize(self, os.close, self.fd)
        self.size = 0
        for piece in pieces:
            self.size += len(piece)
            view = memoryview(piece)
            while view:
                view = view[os.write(self.fd, view) :]
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def close(self) -> None:
        self._closer()

    def __enter__(self) -> SealedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
