"""Which stage of a run holds, for which prompt group, and when the next one begins (section 5.2).

    stages = Stages(config, problems, run.curriculum, pass_rates)
    stages.restore(step, How.REPEATED)
    stages.problem(ordinal), stages.at(ordinal)      of a group: it keeps its stage to its end
    stages.group_done(group, outcome)
    if stages.step_trained(step, next_ordinal): ...  the next stage holds from now on

What changes with a stage (see `config_curriculum.py`) changes between two steps, all of it: new
groups are admitted and the next batch is taken by the new values. Groups that are under way keep
the l_max that they were sampled with, and are graded by it.

<run>/curriculum.jsonl holds a line a step, with what the rules look at, and a line a stage, with
the rule that began it. A run that goes on reads there which stage it is in.
"""

from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_magistral.algorithm.curriculum import Decision, Rule, StepTally, decide
from megatron_magistral.config import Config
from megatron_magistral.config_curriculum import RlStageConfig
from megatron_magistral.data.pass_rates import GroupResult, PassRates
from megatron_magistral.rollout.events import How, Outcome
from megatron_magistral.rollout.pipeline import Grader
from megatron_magistral.rollout.source import PromptSource
from megatron_magistral.types import GradeStatus, Group, Problem

log = logging.getLogger(__name__)

REWARD_SIZES = ("l_max", "l_cache")
RL_SIZES = (
    *("n_async", "n_batch", "n_minibatch", "queue_capacity"),
    *("kv_budget_tokens", "kv_reserve"),
)
"""What changes with a stage and is named in the log, by section of the config."""


class StageBegan(msgspec.Struct, frozen=True, tag="stage"):
    """Stage `stage`, from 1 on, holds from `step` and from the group `first_ordinal` on."""

    stage: int
    step: int
    first_ordinal: int
    rule: Rule
    reason: str
    left_out: tuple[str, ...]
    """Ids of the problems that went out with it."""


Record = StepTally | StageBegan


@dataclass(frozen=True)
class LaterStage:
    """What a stage brings with it: problems that come in, and how its groups are graded."""

    problems: Sequence[Problem]
    grade: Grader


class NoProblemsLeft(RuntimeError):
    """Every problem of a stage would be left out as solved."""


class Stages:
    """`problems` holds those of the first stage, then those that come in with each later one."""

    def __init__(
        self, config: Config, problems: Sequence[Sequence[Problem]], path: Path, rates: PassRates
    ) -> None:
        assert config.rl is not None
        self._later: tuple[RlStageConfig, ...] = config.rl.stages
        self._configs = [config.at_stage(index) for index in range(config.num_rl_stages)]
        self._problems = problems
        self._path = path
        self._rates = rates
        self._seed = config.run.seed
        self._steps: dict[int, StepTally] = {}
        self._begins: list[StageBegan] = []
        self._sources = [PromptSource(problems[0], self._seed)]
        self._pools = [tuple(problems[0])]
        self._forget_counts()

    @property
    def index(self) -> int:
        """The stage that holds now, from 0 on."""
        return len(self._begins)

    @property
    def config(self) -> Config:
        """What holds now."""
        return self._configs[self.index]

    @property
    def num_problems(self) -> int:
        return len(self._pools[-1])

    def stage_of(self, ordinal: int) -> int:
        """The stage in which a group was, or will be, admitted."""
        return bisect.bisect_right([began.first_ordinal for began in self._begins], ordinal)

    def at(self, ordinal: int) -> Config:
        """What holds for a group."""
        return self._configs[self.stage_of(ordinal)]

    def problem(self, ordinal: int) -> Problem:
        """A function of the seed, the stage and the place of the group in its stage."""
        stage = self.stage_of(ordinal)
        first = self._begins[stage - 1].first_ordinal if stage else 0
        return self._sources[stage].problem(ordinal - first)

    def restore(self, step: int, how: How) -> None:
        """Go on from `step`. Steps from there on that are trained anew are forgotten, and with them
        the stages that began after it; those that are repeated are not.

        Raises ValueError if the file is of another curriculum.
        """
        records = _read(self._path)
        if how is How.ANEW:
            records = [
                record for record in records if record.step < step or _begins_at(record, step)
            ]
        self._steps, self._begins = {}, []
        del self._sources[1:], self._pools[1:]
        self._forget_counts()
        for record in records:
            if isinstance(record, StepTally):
                self._steps[record.step] = record
            else:
                self._enter(record)
        _write(self._path, records)

    def group_done(self, group: Group, outcome: Outcome) -> None:
        """Count a group, whatever becomes of it. Rules look at groups of the present stage."""
        graded = [m for m in group.members if m.reward.status is GradeStatus.GRADED]
        num_solved = sum(member.reward.is_solved for member in graded)
        self._rates.add(GroupResult(group.ordinal, group.problem.id, len(graded), num_solved))
        if self.stage_of(group.ordinal) != self.index:
            return
        reward = self.config.reward
        self._num_groups += 1
        self._num_dropped += outcome is Outcome.DROPPED
        self._num_completions += len(graded)
        self._reward_sum += sum(member.reward.total for member in graded)
        self._num_near_l_max += sum(
            len(member.completion.output_ids) > reward.l_max - reward.l_cache for member in graded
        )

    def step_trained(self, step: int, next_ordinal: int) -> bool:
        """Whether the next stage begins with the step that follows, and so with the next group.

        Raises NoProblemsLeft.
        """
        if step in self._steps:  # repeated: what it led to is known
            return False
        self._steps[step] = tally = StepTally(
            step,
            self._num_completions,
            self._reward_sum,
            self._num_near_l_max,
            self._num_groups,
            self._num_dropped,
        )
        self._forget_counts()
        _append(self._path, tally)
        decision = self._decide()
        if decision.rule is Rule.NONE:
            return False
        self._begin(decision, step + 1, next_ordinal)
        return True

    def metrics(self) -> dict[str, float]:
        return {"stage_index": float(self.index), "stage_problems": float(self.num_problems)}

    def _forget_counts(self) -> None:
        self._num_completions = self._num_near_l_max = self._num_groups = self._num_dropped = 0
        self._reward_sum = 0.0

    def _decide(self) -> Decision:
        if self.index == len(self._later):
            return Decision(Rule.NONE)
        first = self._begins[-1].step if self._begins else 0
        steps = [self._steps[step] for step in sorted(self._steps) if step >= first]
        return decide(steps, self._later[self.index].begin.rules())

    def _begin(self, decision: Decision, step: int, next_ordinal: int) -> None:
        before, stage = self.config, self.index + 1
        bound = self._later[self.index].drop_solved_above
        rates = self._rates.rates() if bound is not None else {}
        known = {p.id for p in (*self._pools[-1], *self._problems[stage])}
        left_out = sorted(id for id, rate in rates.items() if id in known and rate > (bound or 0))
        began = StageBegan(
            stage, step, next_ordinal, decision.rule, decision.reason, tuple(left_out)
        )
        self._enter(began)
        _append(self._path, began)
        log.info(
            "stage %d begins with step %d, by the rule %s: %s; %s; %d problems come in, %d that "
            "are solved go out, %d are left",
            *(stage, step, decision.rule, decision.reason, _changes(before, self.config)),
            *(len(self._problems[stage]), len(left_out), self.num_problems),
        )

    def _enter(self, began: StageBegan) -> None:
        stage = began.stage
        if stage != self.index + 1 or stage > len(self._later):
            raise ValueError(
                f"{self._path}: stage {stage} began at step {began.step}, but the config has "
                f"{len(self._later)} later stages and {self.index} of them came before it"
            )
        out = set(began.left_out)
        pool = tuple(p for p in (*self._pools[-1], *self._problems[stage]) if p.id not in out)
        if not pool:
            raise NoProblemsLeft(
                f"stage {stage}: all {len(out)} problems are solved more often than "
                f"drop_solved_above = {self._later[stage - 1].drop_solved_above}: nothing is left "
                "to learn; give harder ones as add_problems"
            )
        self._pools.append(pool)
        self._sources.append(PromptSource(pool, f"{self._seed}/stage {stage}"))
        self._begins.append(began)


def _begins_at(record: Record, step: int) -> bool:
    """It was decided by the steps before `step`, which stay."""
    return isinstance(record, StageBegan) and record.step == step


def _changes(before: Config, after: Config) -> str:
    """l_max 20480 -> 28672, n_batch 8192 -> 4096, ..."""
    assert before.rl is not None and after.rl is not None
    pairs = [(key, getattr(before.reward, key), getattr(after.reward, key)) for key in REWARD_SIZES]
    pairs += [(key, getattr(before.rl, key), getattr(after.rl, key)) for key in RL_SIZES]
    changes = [f"{key} {old} -> {new}" for key, old, new in pairs if old != new]
    return ", ".join(changes) or "sizes stay as they are"


def _read(path: Path) -> list[Record]:
    """All but a last line that was not written to its end."""
    if not path.exists():
        return []
    content = path.read_bytes()
    return msgspec.json.Decoder(Record).decode_lines(content[: content.rfind(b"\n") + 1])


def _write(path: Path, records: Sequence[Record]) -> None:
    """Replaces the file whole."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.Encoder().encode_lines(records))
    partial.replace(path)


def _append(path: Path, record: Record) -> None:
    """On the disk when it returns: a group of the stage must not outlive its beginning."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")
        file.flush()
        os.fsync(file.fileno())
