"""What users choose of weight updates."""

from __future__ import annotations

from enum import StrEnum


class PlanKind(StrEnum):
    """Who gets what of the weights; see plan.py."""

    GATHER = "gather"
    DIRECT = "direct"
