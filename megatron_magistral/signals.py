"""The signals that ask a program to end, as an exception."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNAL_BASE = 128
"""A shell's exit code of what signal n ended is 128 + n."""
STOPPED = 75
"""Exit code of a role that was asked to stop and saved what it had, to be started again later:
EX_TEMPFAIL of sysexits.h."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked the run to end. Not an Exception, so that nothing takes it for a failure."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into Stopped and ignores those after it: ending
    the processes is bounded in time and must not be broken off. What was ignored stays ignored."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    previous = {
        number: handler
        for number in STOP_SIGNALS
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
