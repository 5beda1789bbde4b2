"""Ends the process groups of a run whose supervisor died without doing it.

The kernel tells the direct children of a dead supervisor (PR_SET_PDEATHSIG), not what they started:
an SGLang server that is still starting, say. The warden holds the other end of a pipe; when the
supervisor is gone, however it went, the pipe closes and the groups still on the list are ended.

    watch <process group>     this group belongs to the run
    forget <process group>    it was ended and reaped
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 5.0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it must outlive what ends the others
    groups: set[int] = set()
    for line in sys.stdin:
        word, group = line.split()
        if word == "watch":
            groups.add(int(group))
        else:
            groups.discard(int(group))
    end(groups)


def end(groups: Iterable[int]) -> None:
    """SIGTERM to every group, SIGKILL to what is left after the grace time."""
    left = [group for group in groups if _signal(group, signal.SIGTERM)]
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [group for group in left if _signal(group, 0)]
    for group in left:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Whether the group is there to be signalled."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main()
