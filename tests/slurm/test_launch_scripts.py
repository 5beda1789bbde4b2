"""launch/: lint, and that every script asks for the nodes on which its config fits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_magistral import config_file
from megatron_magistral.placement import place_roles

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
JOBS = [path for path in SCRIPTS if "launch/lib/job.sh" in path.read_text()]
LIBRARY = sorted((ROOT / "launch" / "lib").glob("*.sh"))
# What may differ between the jobs of two configs.
OWN = re.compile(r"^(# .*|#|#SBATCH --(job-name|nodes|ntasks-per-node|gpus-per-node|time)=.*)$")


def names(path: Path) -> str:
    return path.stem


def directive(path: Path, name: str) -> str:
    (value,) = re.findall(rf"^#SBATCH --{name}=(.*)$", path.read_text(), re.MULTILINE)
    return str(value)


def test_the_scripts_are_clean_for_shellcheck() -> None:
    """One job of many: what they source is most of each, and all have the same body."""
    shellcheck = Path(sys.executable).parent / "shellcheck"
    scripts = [JOBS[0], *(path for path in SCRIPTS if path not in JOBS), *LIBRARY]
    done = subprocess.run(
        (shellcheck, "--external-sources", *scripts),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", JOBS, ids=names)
def test_the_nodes_of_a_job_are_those_that_its_config_fills(path: Path) -> None:
    # Models and data are the user's to bring.
    config = config_file.load(ROOT / "configs" / f"{path.stem}.yaml", check_files=False)
    nodes, places = (int(directive(path, name)) for name in ("nodes", "ntasks-per-node"))
    placement = place_roles(config, nodes, places)
    # In an SFT run, generators have the trainers' GPUs when these are done.
    used = {*placement.trainers, *(gpu for each in placement.generators for gpu in each.gpus)}
    assert len(used) == nodes * places
    assert directive(path, "job-name") == path.stem


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "ablations").glob("*.yaml")), ids=names)
def test_an_ablation_fills_the_nodes_that_the_docs_say(path: Path) -> None:
    config = config_file.load(path, check_files=False)
    assert config.model.path is not None
    nodes = 10 if "3b" in config.model.path.name else 16
    assert place_roles(config, nodes).num_idle_gpus == 0


def test_all_jobs_have_the_same_body() -> None:
    bodies = {
        "\n".join(
            line.replace(f"configs/{path.stem}.yaml", "configs/NAME.yaml")
            for line in path.read_text().splitlines()
            if not OWN.match(line) or line.startswith("# shellcheck")
        )
        for path in JOBS
    }
    assert len(bodies) == 1


@pytest.mark.parametrize("path", JOBS, ids=names)
def test_a_gpu_takes_one_process(path: Path) -> None:
    if "--gpus-per-node" in path.read_text():
        assert directive(path, "gpus-per-node") == directive(path, "ntasks-per-node")


def test_there_is_a_job_for_every_run_of_the_paper() -> None:
    configs = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert configs - {path.stem for path in JOBS} == {"smollm2"}  # which runs on a laptop
