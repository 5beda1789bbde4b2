"""A plugin that SGLang loads into its own processes (entry point group `sglang.srt.plugins`).

With the overlap scheduler one forward pass is still running on its own stream when an in-place
pause returns. A weight update that starts then can be read half-way by that pass, or deadlock its
tensor-parallel all-reduce. SGLang has no call that waits for it, so a hook before
`begin_weight_update` synchronises the streams: once begin has answered, no forward is in flight.

The plugin also answers two questions about the weights that SGLang has no call for: where each
tensor of a manifest would go, and digests of what is there (sglang_weights.py). They come as an
`action` of `/weights_checker`, which SGLang already hands to every tensor-parallel rank in turn
with the other control calls, and are answered in its `message`: neither depends on a version.

SGLang only logs a plugin that fails to load. The scheduler therefore reports in `/server_info` that
the hook is in place and how often it ran; `EngineControl.check_server` reads that.

Nothing but the standard library is imported at module level: every SGLang process imports this.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

UPDATER_MODULE = "sglang.srt.managers.scheduler_components.weight_updater"
UPDATER_CLASS = "SchedulerWeightUpdaterManager"
BEGIN_UPDATE = "begin_weight_update"
CHECK_WEIGHTS = "check_weights"
GET_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"

STATE_KEY = "magistral_plugin"
# An action of `/weights_checker` with this prefix is ours; the rest is a question as JSON.
ACTION_PREFIX = "magistral:"

_num_quiesced = 0
_placement: Any = None  # of the last manifest that was asked about, on this rank


def register() -> None:
    """Entry point: register the hooks. Runs once in every SGLang process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    updater = f"{UPDATER_MODULE}.{UPDATER_CLASS}"
    HookRegistry.register(f"{updater}.{BEGIN_UPDATE}", quiesce, HookType.BEFORE)
    HookRegistry.register(f"{updater}.{CHECK_WEIGHTS}", answer_about_weights, HookType.AROUND)
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


def answer_about_weights(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Answer a question of ours with the answers of all tensor-parallel ranks, in their order.

    Every rank gets the same question, and waits for the others' answers also when its own fails.
    """
    if not request.action.startswith(ACTION_PREFIX):
        return original(updater, request)
    import torch.distributed as dist
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    question = json.loads(request.action.removeprefix(ACTION_PREFIX))
    mine: dict[str, Any]
    try:
        mine = {"answer": answer(updater.tp_worker.model_runner.model, question)}
    except Exception as error:
        # A worker's edge: the question failed, the server goes on.
        mine = {"error": f"{type(error).__name__}: {error}"}
    ranks: list[Any] = [None] * dist.get_world_size(group=updater.tp_cpu_group)
    dist.all_gather_object(ranks, mine, group=updater.tp_cpu_group)
    errors = [f"rank {i}: {rank['error']}" for i, rank in enumerate(ranks) if "error" in rank]
    if errors:
        return CheckWeightsReqOutput(success=False, message="; ".join(errors))
    message = json.dumps([rank["answer"] for rank in ranks])
    return CheckWeightsReqOutput(success=True, message=message)


def answer(model: Any, question: dict[str, Any]) -> dict[str, Any]:
    """`{"place": tensors}`: where each would be loaded. `{"digest": names}`: of what is loaded."""
    global _placement
    from megatron_magistral.rollout.sglang_weights import digests, observe_loading

    if "place" in question:
        _placement = observe_loading(model, question["place"])
        return asdict(_placement)
    if _placement is None:
        raise ValueError("a digest was asked for before the manifest was placed")
    return digests(model, _placement, question["digest"])


def report(result: Any, *args: Any, **kwargs: Any) -> None:
    """Add the state of the hook to the scheduler's internal state, seen in `/server_info`."""
    result.internal_state[STATE_KEY] = {"active": is_active(), "num_quiesced": _num_quiesced}


def is_active() -> bool:
    """Whether SGLang's methods are really the wrapped ones, not merely registered to become it."""
    updater = getattr(sys.modules.get(UPDATER_MODULE), UPDATER_CLASS, None)
    hooked = (BEGIN_UPDATE, CHECK_WEIGHTS)
    return all(hasattr(getattr(updater, name, None), "__wrapped__") for name in hooked)
