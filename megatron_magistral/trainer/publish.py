"""Publishing: the trainer's weights into every generator, in the middle of generation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from megatron_magistral.config import Config, GeneratorConfig
from megatron_magistral.prompts import load_template, render_prompt
from megatron_magistral.rollout.engine import ControlTimeouts
from megatron_magistral.trainer.feed import Feed
from megatron_magistral.trainer.step import Trainer
from megatron_magistral.types import TrainSequence
from megatron_magistral.weights.checksum import ChecksumSettings
from megatron_magistral.weights.delivery import EngineAddress
from megatron_magistral.weights.fleet import Fleet, FleetExhausted, FleetSettings, Round
from megatron_magistral.weights.gather import Reach
from megatron_magistral.weights.lane import OwnLane
from megatron_magistral.weights.leader import Leader, link_leaders, peer_lanes
from megatron_magistral.weights.link import Link
from megatron_magistral.weights.manifest import manifest_of
from megatron_magistral.weights.names import hf_shapes
from megatron_magistral.weights.probe import AlarmSettings
from megatron_magistral.weights.probe_engines import PendingProbe, ProbeHistory
from megatron_magistral.weights.settings import PlanKind
from megatron_magistral.weights.transfer import UpdateTimings, WeightSender

log = logging.getLogger(__name__)

MIB = 1 << 20
# The probe is a prompt of the run, cut to so many tokens.
MAX_PROBE_TOKENS = 256
PROBE_STATEMENT = "What is 6 times 7?"


@dataclass(frozen=True)
class PublishSettings:
    """What is done beyond sending: checks of what arrived, and bounds for engines that fail.
    `host` is the address at which engines, and other leaders, reach this rank."""

    host: str = "127.0.0.1"
    checksums: ChecksumSettings = field(default_factory=ChecksumSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    alarm: AlarmSettings = field(default_factory=AlarmSettings)

    @staticmethod
    def of(config: GeneratorConfig, host: str) -> PublishSettings:
        checks, recovery = config.checks, config.recovery
        return PublishSettings(
            host=host,
            checksums=ChecksumSettings(
                sample_stride=checks.sample_stride, full_every=checks.full_every_updates
            ),
            fleet=FleetSettings(
                alive_s=recovery.alive_s,
                restart_s=recovery.start_s,
                wait_s=recovery.update_wait_s,
                max_restarts=recovery.max_restarts,
                max_tries=recovery.max_update_tries,
            ),
            alarm=AlarmSettings(
                factor=checks.alarm_factor,
                patience=checks.alarm_updates,
                window=checks.alarm_window_updates,
                min_history=checks.alarm_min_updates,
                floor=checks.alarm_floor_nats,
            ),
        )


class WeightPublisher:
    """Every rank publishes: the leader of each pipeline stage sends what its stage gathers, and the
    first of them, rank 0, controls that.

    The controller holds back new requests from before the pause until the engines that it is then
    told of have the new version, so that a request's cache salt names the weights that it starts
    on. An engine that does not get the version is left out of that list, and of the traffic.
    """

    def __init__(
        self,
        trainer: Trainer,
        feed: Feed,
        config: Config,
        generators: Sequence[str],
        *,
        speaks: bool,
        settings: PublishSettings | None = None,
    ) -> None:
        assert config.rl is not None
        settings = settings or PublishSettings()
        self._trainer = trainer
        self._feed = feed
        self._dtype = getattr(torch, config.generator.dtype)
        self._bucket_bytes = int(config.rl.weight_bucket_mib * MIB)
        # A bucket that goes to a loader must be one run of bytes.
        self._lends = config.rl.weight_plan is PlanKind.DIRECT
        self._microbatch_tokens = config.rl.microbatch_tokens
        self._probe = _probe_sequence(trainer, config)
        self._history = ProbeHistory(settings.alarm)
        self._fleet: Fleet | None = None
        self._sender: WeightSender | None = None
        self._leader: Leader | None = None
        self._links: list[Link] = []
        feed.wait_ready(config.generator.start_timeout_s)
        mesh, patience_s = trainer.mesh, config.parallel.timeout_s
        if mesh.is_leader:
            self._links = link_leaders(mesh, settings.host, patience_s)
        if speaks:
            self._sender = _make_sender(trainer, config, self._dtype, settings, self._links)
            tp = config.generator.tensor_parallel
            engines = [EngineAddress(url, tp) for url in generators]
            self._fleet = Fleet(self._sender, engines, settings.fleet)
            self._fleet.connect()
            self._sender.release()
        elif mesh.is_leader:
            (link,) = self._links
            packing = trainer.staging.packing
            lane = OwnLane(settings.host, _wire_backend(), _timeouts(config), packing)
            self._leader = Leader(lane, link, self._dtype, patience_s)
            self._leader.serve(())

    def publish(self, version: int) -> dict[str, float]:
        """Send the present weights as `version`; the metrics, on the rank that sends.

        Raises:
            FleetExhausted: no engine could be updated; on every rank.
            LaneLost: on rank 0, the leader of another pipeline stage is gone or silent.
            LinkLost: on such a leader, rank 0 is.
        """
        if self._fleet is not None:
            pinned = self._feed.begin_update(version)
            self._fleet.begin(version, pinned)
        num_rounds = 1
        while (outcome := self._round()) is Round.AGAIN:
            num_rounds += 1
        if outcome is Round.FAILED:
            known = self._fleet.describe() if self._fleet else "the log of rank 0 says why"
            raise FleetExhausted(
                f"update to version {version}: no engine could be updated: {known}"
            )
        if self._fleet is None:
            self._score_probe()
            return {}
        self._feed.end_update(version, self._fleet.serving)
        metrics = update_metrics(self._fleet) | {"update_rounds": float(num_rounds)}
        return metrics | self._compare_probe(self._fleet, version)

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
        if self._leader is not None:
            self._leader.close()
        for link in self._links:
            link.close()

    def _round(self) -> Round:
        """One round on every rank; what rank 0 says about it."""
        buckets = self._trainer.named_hf_buckets(
            self._bucket_bytes, self._dtype, Reach.LEADERS, lends=self._lends
        )
        outcome = Round.DONE
        if self._fleet is not None:
            assert self._sender is not None
            outcome = self._fleet.round(buckets)
            self._sender.release()
        elif self._leader is not None:
            self._leader.serve(buckets)
        else:
            for _ in buckets:
                pass
        told = torch.tensor(int(outcome), device=self._trainer.model.device)
        dist.broadcast(told, src=0)
        return Round(int(told))

    def _score_probe(self) -> list[float]:
        """The probe's log-probabilities [T - 1] under the present weights. Collective."""
        batches = self._trainer.pack([self._probe], self._microbatch_tokens)
        (scores,) = self._trainer.score(batches)
        return scores.float().tolist()

    def _compare_probe(self, fleet: Fleet, version: int) -> dict[str, float]:
        with closing(PendingProbe(fleet.serving_addresses, self._probe.tokens, version)) as pending:
            ours = self._score_probe()
            gaps, errors = pending.gaps(ours)
        for error in errors:
            log.warning("%s", error)
        return self._history.add(gaps) | {"probe_failures": float(len(errors))}


def _make_sender(
    trainer: Trainer,
    config: Config,
    dtype: torch.dtype,
    settings: PublishSettings,
    links: Sequence[Link],
) -> WeightSender:
    assert config.rl is not None
    timeouts = _timeouts(config)
    return WeightSender(
        manifest_of(hf_shapes(trainer.arch), dtype),
        backend=_wire_backend(),
        host=settings.host,
        dtype=dtype,
        timeouts=timeouts,
        checksums=settings.checksums,
        peers=peer_lanes(trainer.mesh, links, timeouts),
        plan=config.rl.weight_plan,
        packing=trainer.staging.packing,
    )


def _wire_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _timeouts(config: Config) -> ControlTimeouts:
    return ControlTimeouts(transfer_s=config.generator.update_timeout_s)


def _probe_sequence(trainer: Trainer, config: Config) -> TrainSequence:
    """A prompt of this run, of which every token but the first is scored."""
    assert config.rl is not None
    text = render_prompt(PROBE_STATEMENT, load_template(config.data.prompt_file))
    tokens = AutoTokenizer.from_pretrained(trainer.hf_dir).encode(text)
    most = min(MAX_PROBE_TOKENS, config.rl.microbatch_tokens)
    # Two tokens: one to start from, one to score.
    tokens = tuple((tokens * 2 if len(tokens) < 2 else tokens)[:most])
    num_scored = len(tokens) - 1
    return TrainSequence(
        tokens=tokens,
        num_prompt_tokens=1,
        logprobs=(0.0,) * num_scored,
        spans=(),
        advantage=0.0,
        weight=0.0,
    )


def update_metrics(fleet: Fleet) -> dict[str, float]:
    """The last round's timings, and what became of the engines."""
    metrics = {
        "engines_serving": float(len(fleet.serving)),
        "engines_quarantined": float(len(fleet.statuses) - len(fleet.serving)),
        "checksum_mismatches_total": float(fleet.num_mismatches),
    }
    return metrics | (timing_metrics(fleet.timings) if fleet.timings else {})


def timing_metrics(timings: UpdateTimings) -> dict[str, float]:
    return {
        "update_total_s": timings.total_s,
        "update_prepare_s": timings.prepare_s,
        "update_pause_s": timings.pause_s,
        "update_transfer_s": timings.transfer_s,
        "update_checksum_s": timings.checksum_s,
        "update_bytes": float(timings.num_bytes),
        "update_tensors_checked": float(timings.num_checked),
    }
