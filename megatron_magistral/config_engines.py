"""How weights in the engines are checked, and what is done about engines that fail: sections of
`config.GeneratorConfig`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from megatron_magistral.config_section import Count, Positive, PositiveFloat, Section


class ChecksConfig(Section):
    """Digests of tensors are read back from the engines after every update, and a prompt is scored
    by engines and trainer, whose log-probabilities must not drift apart."""

    sample_stride: Positive = 16
    """An update checks one in so many tensors, another share each time."""
    full_every_updates: Positive = 50
    """So often all tensors are checked, as they are at an engine's first update."""
    alarm_factor: Annotated[float, Field(gt=1)] = 4.0
    """A difference beyond so many times the usual one is a step towards an alarm."""
    alarm_updates: Positive = 3
    """So many updates in a row beyond it raise the alarm."""
    alarm_window_updates: Positive = 64
    """The usual difference is the median of at most so many updates before those."""
    alarm_min_updates: Positive = 8
    """With fewer updates before those there is no alarm."""
    alarm_floor_nats: PositiveFloat = 1e-5
    """A median below this is rounding, and counts as this."""

    @model_validator(mode="after")
    def _window_holds_the_least(self) -> Self:
        if self.alarm_min_updates > self.alarm_window_updates:
            raise ValueError(
                f"alarm_min_updates = {self.alarm_min_updates} must not exceed "
                f"alarm_window_updates = {self.alarm_window_updates}"
            )
        return self


class RecoveryConfig(Section):
    """Bounds of what is done about engines that end, hang, or miss a part of an update."""

    max_restarts: Count = 3
    """Of one engine in a run; then the run goes on with the others, and ends when none is left."""
    restart_backoff_s: PositiveFloat = 1.0
    """Between the end of an engine and its first restart; twice as long before each further one."""
    suspect_s: PositiveFloat = 30.0
    """So long an engine that broke off a request may take to answer before it is restarted."""
    start_s: PositiveFloat = 600.0
    """So long a restarted engine may take until it answers."""
    max_request_tries: Positive = 8
    """Engines that are tried with one request."""
    request_wait_s: PositiveFloat = 1800.0
    """Longest wait of a request for a healthy engine."""
    max_update_tries: Positive = 2
    """So often an engine may fail during one update before the update leaves it out."""
    alive_s: PositiveFloat = 5.0
    """So long an engine that failed in an update may take to answer, to be tried again."""
    update_wait_s: PositiveFloat = 300.0
    """So long an update waits for an engine that is restarting, where no other is left."""
    update_bound_s: PositiveFloat = 900.0
    """After so long without its end, the sender of an update counts as lost."""

    @model_validator(mode="after")
    def _waits_fit(self) -> Self:
        if self.suspect_s >= self.start_s:
            raise ValueError(
                f"suspect_s = {self.suspect_s} must be less than start_s = {self.start_s}: an "
                "engine that is starting is silent for longer than one that works"
            )
        if self.update_wait_s >= self.update_bound_s:
            raise ValueError(
                f"update_wait_s = {self.update_wait_s} must be less than update_bound_s = "
                f"{self.update_bound_s}: else an update that waits counts as lost"
            )
        return self

    def problems(self, collective_timeout_s: float) -> list[str]:
        """What contradicts the time after which a collective of the trainers is an error: while
        one rank waits for an engine, the others wait in one."""
        if self.update_wait_s < collective_timeout_s:
            return []
        return [
            f"generator.recovery.update_wait_s = {self.update_wait_s} must be less than "
            f"parallel.timeout_s = {collective_timeout_s}, after which the trainer ranks that wait "
            "with the sender give up"
        ]
