"""What the rollout side of a run shows: numbers of each step, and live ones for Prometheus."""

from __future__ import annotations

from megatron_magistral.rollout.engine_pool import EnginePool
from megatron_magistral.rollout.engine_state import state_metrics
from megatron_magistral.rollout.events import Outcome
from megatron_magistral.rollout.queue import GroupQueue
from megatron_magistral.rollout.stats import RolloutStats, padding_metrics, staleness_metrics
from megatron_magistral.types import Batch


def live_metrics(queue: GroupQueue, pool: EnginePool) -> dict[str, float]:
    """What is true at this moment."""
    return {
        "queue_sequences": float(queue.num_waiting),
        "in_flight_sequences": float(queue.num_in_flight),
        "requests_retried_total": float(pool.num_retried),
        "updates_lost_total": float(pool.num_lost_updates),
        **state_metrics(pool.statuses.values()),
        **{f"groups_{o}_total": float(queue.outcomes[o]) for o in Outcome},
    }


def batch_metrics(
    batch: Batch, stats: RolloutStats, queue: GroupQueue, pool: EnginePool, max_tokens: int
) -> dict[str, float]:
    """Of the batch that is handed over now, and of the time since the one before. Forgets what it
    reports of the latter. `max_tokens` is the budget of a microbatch."""
    sequences = [s for minibatch in batch.minibatches for s in minibatch.sequences]
    return {
        **stats.drain(),
        **live_metrics(queue, pool),
        **queue.drain_admission(),
        **pool.loads.drain(),
        **pool.kv.drain(),
        **staleness_metrics(sequences, pool.version),
        **padding_metrics(batch, max_tokens),
    }
