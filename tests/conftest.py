"""For all tests: SIGTERM, as `timeout` and CI send it, ends them as Ctrl-C does.

Fixtures are torn down then, and with them the servers that they have started, which would go on.
"""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
