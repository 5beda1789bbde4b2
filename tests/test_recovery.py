"""A run with two engines: one is killed, one hangs, the verifier is killed, at last the sender is.

Everything is real, and happens to one run, which takes five minutes on two busy cores:

    pytest -m slow tests/test_recovery.py
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import pytest

from megatron_magistral.run_folder import RunFolder
from tests.cli_runs import MICRO, CliRun

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.distributed]

NUM_ENGINES = 2
OVERRIDES = (
    f"generator.num_replicas={NUM_ENGINES}",
    "generator.request_timeout_s=20",  # after which a request of the engine that hangs breaks off
    "generator.recovery.suspect_s=20",
    "rl.num_steps=100000",
    "rl.optimizer.lr=1.0e-5",
    "checkpoint.rl_every_steps=0",
    "evaluation.num_problems=2",
)


@dataclass(frozen=True)
class Survivor:
    """What the run left behind, and the step that was trained last before each blow."""

    run: RunFolder
    rows: list[dict]
    killed_after: int
    hung_after: int
    no_verifier_after: int
    returncode: int
    output: str
    left_running: list[psutil.Process]

    def served_after(self, step: int) -> list[float]:
        """Engines that got the weights of each step after `step`."""
        return [row["engines_serving"] for row in self.rows if row["step"] > step]


def rl_rows(cli: CliRun) -> list[dict]:
    """The steps of the RL stage so far."""
    metrics = [RunFolder(folder).metrics for folder in cli.runs.glob("*")]
    texts = [path.read_text() for path in metrics if path.exists()]
    # What follows the last end of a line is being written.
    lines = [line for text in texts for line in text.rpartition("\n")[0].splitlines()]
    return [row for row in map(json.loads, lines) if row["stage"] == "rl"]


def last_step(cli: CliRun) -> int:
    return rl_rows(cli)[-1]["step"]


def children(cli: CliRun, role: str) -> list[psutil.Process]:
    """The processes of a role that the launcher started itself, in this order."""
    found = psutil.Process(cli.process.pid).children()
    mine = [process for process in found if process.pid in cli.pids(role)]
    return sorted(mine, key=psutil.Process.create_time)


def scheduler(server: psutil.Process) -> psutil.Process:
    (found,) = (p for p in server.children() if p.cmdline()[0].startswith("sglang::scheduler"))
    return found


def wait_for_loss_and_return(cli: CliRun) -> int:
    """Wait until an engine is missing and then until none is; the last step before that."""
    before = last_step(cli)

    def serving(rows: Sequence[dict]) -> list[float]:
        return [row["engines_serving"] for row in rows if row["step"] > before]

    cli.wait_until(lambda: NUM_ENGINES - 1 in serving(rl_rows(cli)))
    cli.wait_until(lambda: serving(rl_rows(cli))[-1] == NUM_ENGINES)
    return before


def grades_again(cli: CliRun, step: int) -> bool:
    """Whether a batch came whole that was begun well after `step`."""
    row = rl_rows(cli)[-1]
    return row["step"] > step + 5 and row["masked_completions"] == 0


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Survivor:
    folder = tmp_path_factory.mktemp("recovery")
    with CliRun(folder, "train", str(MICRO), *OVERRIDES) as cli:
        cli.wait_until(lambda: len(rl_rows(cli)) >= 2)
        first, second = children(cli, "generator")
        second.kill()
        killed_after = wait_for_loss_and_return(cli)
        scheduler(first).send_signal(signal.SIGSTOP)
        hung_after = wait_for_loss_and_return(cli)
        (verifier,) = children(cli, "verifier")
        verifier.kill()
        no_verifier_after = last_step(cli)
        cli.wait_until(lambda: grades_again(cli, no_verifier_after))
        rows = rl_rows(cli)
        (sender,) = (p for p in children(cli, "trainer") if p.environ()["RANK"] == "0")
        sender.kill()
        return Survivor(
            run=RunFolder(cli.folder),
            rows=rows,
            killed_after=killed_after,
            hung_after=hung_after,
            no_verifier_after=no_verifier_after,
            returncode=cli.wait(),
            output=cli.output,
            left_running=cli.left_running(),
        )


def test_training_goes_on_without_an_engine_and_takes_it_back(survivor: Survivor) -> None:
    assert [row["step"] for row in survivor.rows] == list(range(len(survivor.rows)))
    for step in (survivor.killed_after, survivor.hung_after):
        served = survivor.served_after(step)
        assert NUM_ENGINES - 1 in served
        assert NUM_ENGINES in served[served.index(NUM_ENGINES - 1) :]


def test_the_launcher_names_what_it_restarts_and_why(survivor: Survivor) -> None:
    assert "generator-1 was killed by SIGKILL after" in survivor.output
    assert "generator-0 was asked to be restarted, as it gave no sign of life" in survivor.output
    assert "verifier was killed by SIGKILL after" in survivor.output
    assert survivor.output.count("; restart 1 of 3 in 1 s; see") == 3


def test_no_completion_is_lost_with_an_engine(survivor: Survivor) -> None:
    assert survivor.rows[-1]["requests_retried_total"] > 0
    with_verifier = [row for row in survivor.rows if row["step"] <= survivor.no_verifier_after]
    assert all(row["masked_completions"] == 0 for row in with_verifier)
    assert all(row["groups_failed_total"] == 0 for row in with_verifier)


def test_completions_are_graded_again_once_the_verifier_is_back(survivor: Survivor) -> None:
    assert survivor.rows[-1]["step"] > survivor.no_verifier_after
    assert survivor.rows[-1]["masked_completions"] == 0


def test_an_engine_that_comes_back_gets_all_weights_before_its_first_request(
    survivor: Survivor,
) -> None:
    for number in range(NUM_ENGINES):
        log = survivor.run.log(f"generator-{number}").read_text(errors="replace")
        _, _, again = log.rpartition("server_args=")
        assert log.count("Application startup complete") == 2
        assert '"POST /generate' in again
        before, _, _ = again.partition('"POST /generate')
        assert '"POST /end_weight_update' in before


def test_a_sender_that_is_killed_ends_the_run_by_name_and_every_process(survivor: Survivor) -> None:
    assert survivor.returncode == 1
    assert "trainer-0 was killed by SIGKILL after" in survivor.output
    assert survivor.left_running == []
