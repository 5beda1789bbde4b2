"""Publishing: the trainer's weights into every generator, in the middle of generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_magistral.config import Config
from megatron_magistral.rollout.engine import ControlTimeouts
from megatron_magistral.trainer.feed import Feed
from megatron_magistral.trainer.step import Trainer
from megatron_magistral.weights.transfer import EngineAddress, UpdateTimings, WeightSender

MIB = 1 << 20


class WeightPublisher:
    """Every rank publishes: one sends what all of them gather.

    The controller holds back new requests from before the pause until every engine has the new
    version, so that a request's cache salt names the weights that it starts on.
    """

    def __init__(
        self,
        trainer: Trainer,
        feed: Feed,
        config: Config,
        generators: Sequence[str],
        *,
        speaks: bool,
    ) -> None:
        assert config.rl is not None
        self._trainer = trainer
        self._feed = feed
        self._dtype = getattr(torch, config.generator.dtype)
        self._bucket_bytes = int(config.rl.weight_bucket_mib * MIB)
        self._sender: WeightSender | None = None
        feed.wait_ready(config.generator.start_timeout_s)
        if speaks:
            update_timeout_s = config.generator.update_timeout_s
            self._sender = WeightSender(
                backend="nccl" if torch.cuda.is_available() else "gloo",
                dtype=self._dtype,
                timeouts=ControlTimeouts(transfer_s=update_timeout_s),
            )
            tp = config.generator.tensor_parallel
            self._sender.connect([EngineAddress(url, tp) for url in generators])

    def publish(self, version: int) -> dict[str, float]:
        """Send the present weights as `version`; the timings, on the rank that sends."""
        buckets = self._trainer.named_hf_buckets(self._bucket_bytes, self._dtype)
        if self._sender is None:
            for _ in buckets:
                pass
            dist.barrier()
            return {}
        self._feed.begin_update(version)
        timings = self._sender.send(buckets, version)
        self._feed.end_update(version)
        dist.barrier()
        return update_metrics(timings)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


def update_metrics(timings: UpdateTimings) -> dict[str, float]:
    return {
        "update_total_s": timings.total_s,
        "update_prepare_s": timings.prepare_s,
        "update_pause_s": timings.pause_s,
        "update_transfer_s": timings.transfer_s,
        "update_bytes": float(timings.num_bytes),
    }
