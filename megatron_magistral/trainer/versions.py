"""The versions of Megatron-core that this was tested with. Imports nothing that takes time."""

from __future__ import annotations

from enum import StrEnum

from packaging.version import Version

OLDEST = Version("0.16.1")
FIRST_UNTESTED = Version("0.20")


class Support(StrEnum):
    TESTED = "tested"
    UNTESTED = "untested"
    """Newer than all that were tested."""
    TOO_OLD = "too old"

    @property
    def remedy(self) -> str:
        """Empty where none is needed."""
        match self:
            case Support.TESTED:
                return ""
            case Support.UNTESTED:
                return f"tested below {FIRST_UNTESTED}"
            case Support.TOO_OLD:
                return f"install at least {OLDEST}"


def megatron_support(version: str) -> Support:
    found = Version(version)
    if found < OLDEST:
        return Support.TOO_OLD
    # Pre-releases and development builds of the first untested release are as untested.
    return Support.TESTED if found.release < FIRST_UNTESTED.release else Support.UNTESTED
