"""A plugin that SGLang loads into its own processes (entry point group `sglang.srt.plugins`).

With the overlap scheduler one forward pass is still running on its own stream when an in-place
pause returns. A weight update that starts then can be read half-way by that pass, or deadlock its
tensor-parallel all-reduce. SGLang has no call that waits for it, so a hook before
`begin_weight_update` synchronises the streams: once begin has answered, no forward is in flight.

SGLang only logs a plugin that fails to load. The scheduler therefore reports in `/server_info` that
the hook is in place and how often it ran; `Generator.check_plugin` reads that.

Nothing but the standard library is imported at module level: every SGLang process imports this.
"""

from __future__ import annotations

import sys
from typing import Any

UPDATER_MODULE = "sglang.srt.managers.scheduler_components.weight_updater"
UPDATER_CLASS = "SchedulerWeightUpdaterManager"
BEGIN_UPDATE = "begin_weight_update"
GET_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"

STATE_KEY = "magistral_plugin"

_num_quiesced = 0


def register() -> None:
    """Entry point: register both hooks. Runs once in every SGLang process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        f"{UPDATER_MODULE}.{UPDATER_CLASS}.{BEGIN_UPDATE}", quiesce, HookType.BEFORE
    )
    HookRegistry.register(GET_INTERNAL_STATE, report, HookType.AFTER)


def quiesce(updater: Any, *args: Any, **kwargs: Any) -> None:
    """Wait until the forward pass in flight has finished with the old weights.

    `updater` is SGLang's SchedulerWeightUpdaterManager. The original method ends with a barrier
    over the tensor-parallel ranks, so after it every rank is quiet. On a CPU both streams are
    no-ops: a pass has ended before any control request is looked at.
    """
    global _num_quiesced
    scheduler = updater.scheduler
    for name in ("forward_stream", "schedule_stream"):
        stream = getattr(scheduler, name, None)
        if stream is not None and hasattr(stream, "synchronize"):
            stream.synchronize()
    _num_quiesced += 1


def report(result: Any, *args: Any, **kwargs: Any) -> None:
    """Add the state of the hook to the scheduler's internal state, seen in `/server_info`."""
    result.internal_state[STATE_KEY] = {"active": is_active(), "num_quiesced": _num_quiesced}


def is_active() -> bool:
    """Whether SGLang's method is really the wrapped one, not merely registered to become it."""
    updater = getattr(sys.modules.get(UPDATER_MODULE), UPDATER_CLASS, None)
    return hasattr(getattr(updater, BEGIN_UPDATE, None), "__wrapped__")
