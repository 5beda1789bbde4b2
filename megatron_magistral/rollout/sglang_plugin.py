"""A plugin that SGLang loads into its own processes (entry point group `sglang.srt.plugins`).

With the overlap scheduler one forward pass is still running on its own stream when an in-place
pause returns. A weight update that starts then can be read half-way by that pass, or deadlock its
tensor-parallel all-reduce. SGLang has no call that waits for it, so a hook before
`begin_weight_update` synchronises the streams: once begin has answered, no forward is in flight.

No KV cache is shared across an update either. Requests share what they have in common under equal
keys only, and the plugin puts the number of updates that have begun on this server into the key of
each request: when it enters the waiting queue, also anew after it was retracted, and of all that
wait there when an update begins. A request that began before keeps its key with its KV cache, so
what it leaves in the cache is found by none that begins later.

The plugin also does what SGLang has no call for: it tells where each tensor of a manifest would go
and digests of what is there (sglang_weights.py), and receives weights straight into the parameters
(sglang_receive.py). Such a request comes as an `action` of `/weights_checker`, which SGLang already
hands to every tensor-parallel rank in turn with the other control calls, and is answered in its
`message`: nothing of that depends on a version.

SGLang only logs a plugin that fails to load. The scheduler therefore reports in `/server_info` that
the hooks are in place and how many updates began; `EngineControl.check_server` reads that.

Nothing but the standard library is imported at module level: every SGLang process imports this.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

UPDATER_MODULE = "sglang.srt.managers.scheduler_components.weight_updater"
UPDATER_CLASS = "SchedulerWeightUpdaterManager"
BEGIN_UPDATE = "begin_weight_update"
CHECK_WEIGHTS = "check_weights"
SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
SCHEDULER_CLASS = "Scheduler"
GET_INTERNAL_STATE = "get_internal_state"
ADD_TO_QUEUE = "_add_request_to_queue"

# Without any of these, an update would not be sound.
HOOKED = (
    (UPDATER_MODULE, UPDATER_CLASS, BEGIN_UPDATE),
    (UPDATER_MODULE, UPDATER_CLASS, CHECK_WEIGHTS),
    (SCHEDULER_MODULE, SCHEDULER_CLASS, ADD_TO_QUEUE),
)

STATE_KEY = "magistral_plugin"
# An action of `/weights_checker` with this prefix is ours; the rest is a question as JSON.
ACTION_PREFIX = "magistral:"

# How a cache key begins; the key that the request came with follows.
KEY_MARK = re.compile(r"^weights=\d+\|")

_num_updates = 0  # begun on this server; every rank sees the same requests in the same order
_answers: Any = None  # this rank's RankAnswers, from the first question on


def register() -> None:
    """Entry point: register the hooks. Runs once in every SGLang process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    updater = f"{UPDATER_MODULE}.{UPDATER_CLASS}"
    scheduler = f"{SCHEDULER_MODULE}.{SCHEDULER_CLASS}"
    HookRegistry.register(f"{updater}.{BEGIN_UPDATE}", prepare_update, HookType.BEFORE)
    HookRegistry.register(f"{updater}.{CHECK_WEIGHTS}", answer_about_weights, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.{ADD_TO_QUEUE}", mark_request, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.{GET_INTERNAL_STATE}", report, HookType.AFTER)


def prepare_update(updater: Any, *args: Any, **kwargs: Any) -> None:
    """Before an update begins: let the forward in flight end, and part what waits from its cache.

    `updater` is SGLang's SchedulerWeightUpdaterManager. Requests that wait hold no KV cache and
    look for a prefix each time that they may start, so their keys can change until then.
    """
    global _num_updates
    quiesce(updater.scheduler)
    _num_updates += 1
    for request in updater.scheduler.waiting_queue:
        request.extra_key = cache_key(request.extra_key, _num_updates)


def quiesce(scheduler: Any) -> None:
    """Wait until the forward pass in flight has finished with the old weights.

    The original method ends with a barrier over the tensor-parallel ranks, so after it every rank
    is quiet. On a CPU both streams are no-ops: a pass has ended before any control request is
    looked at.
    """
    for name in ("forward_stream", "schedule_stream"):
        stream = getattr(scheduler, name, None)
        if stream is not None and hasattr(stream, "synchronize"):
            stream.synchronize()


def mark_request(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Before a request enters the waiting queue, for the first time or again."""
    request.extra_key = cache_key(request.extra_key, _num_updates)


def cache_key(key: str | None, num_updates: int) -> str:
    """`key` with the number of updates in place of the one that it has, if it has one.

    The number goes in front: SGLang reads the end of the key, where it appends the name of a LoRA.
    """
    return f"weights={num_updates}|" + KEY_MARK.sub("", key or "")


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
        answers = answers_of(dist.get_rank(group=updater.tp_cpu_group))
        mine = {"answer": answers.answer(updater.tp_worker.model_runner.model, question)}
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


def answers_of(rank: int) -> Any:
    """This rank's, made when it is asked for the first time."""
    global _answers
    from megatron_magistral.rollout.sglang_answers import RankAnswers

    _answers = _answers or RankAnswers(rank)
    return _answers


def report(result: Any, *args: Any, **kwargs: Any) -> None:
    """Add the state of the hooks to the scheduler's internal state, seen in `/server_info`."""
    result.internal_state[STATE_KEY] = {"active": is_active(), "num_updates": _num_updates}


def is_active() -> bool:
    """Whether SGLang's methods are really the wrapped ones, not merely registered to become it."""
    classes = [(getattr(sys.modules.get(m), c, None), name) for m, c, name in HOOKED]
    return all(hasattr(getattr(kind, name, None), "__wrapped__") for kind, name in classes)
