"""What a node must be before the big job starts on it. Each node looks at itself, in one task;
then the first node compares what all of them saw.

Every problem is a line that says what is wrong and what would be right; the node's name comes
before it in the job's log.
"""

from __future__ import annotations

import csv
import hashlib
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError, load
from megatron_magistral.preflight import machine_problems
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.slurm.plan import JobPlan, RoleName, attempt_folder

GIB = 1 << 30
TEMPORARY_NEEDED_GIB = 1.0
RUN_FOLDER_NEEDED_GIB = 1.0
# bf16 weights, fp32 masters and two fp32 moments of Adam, over the bf16 weights that a model
# directory holds.
CHECKPOINT_OVER_MODEL = 7
GPU_BUSY_MIB = 1024
NVIDIA_SMI_TIMEOUT_S = 30.0
PACKAGES = ("torch", "megatron-core", "sglang", "transformers")


class NodeReport(msgspec.Struct, frozen=True):
    node: str
    problems: tuple[str, ...]
    facts: Mapping[str, str]
    """What must be the same on all nodes."""


def check_node(run: RunFolder, plan: JobPlan, node: str) -> NodeReport:
    """Looks at the node that this runs on; it may take seconds."""
    try:
        config = load(run.config)
    except ConfigError as error:
        return NodeReport(node, tuple(str(error).splitlines()), {})
    replicas = [i for i, task in enumerate(plan.tasks[RoleName.GENERATOR]) if task.node == node]
    ports = [config.generator.port + i for i in replicas] if config.generator.port else []
    problems = machine_problems(config, ports)
    problems += _space(run.root, run_folder_gib(config), "the run folder")
    problems += _space(Path(tempfile.gettempdir()), TEMPORARY_NEEDED_GIB, "temporary files")
    facts = {package: _version(package) for package in PACKAGES}
    if config.model.path is not None:
        facts["model"] = fingerprint(config.model.path)
    if plan.gpus_per_node:
        rows, problem = _nvidia_smi()
        problems += [problem] if problem else gpu_problems(rows, plan.gpus_per_node)
        facts["driver"] = ", ".join(sorted({row["driver_version"] for row in rows}))
        facts["GPU"] = ", ".join(sorted({row["name"] for row in rows}))
    return NodeReport(node, tuple(problems), facts)


def save_report(report: NodeReport, run: RunFolder, attempt: str) -> None:
    path = attempt_folder(run, attempt) / "preflight" / f"{report.node}.json"
    path.write_bytes(msgspec.json.encode(report))


def read_reports(run: RunFolder, attempt: str) -> list[NodeReport]:
    folder = attempt_folder(run, attempt) / "preflight"
    return [
        msgspec.json.decode(path.read_bytes(), type=NodeReport)
        for path in sorted(folder.glob("*.json"))
    ]


def compare(reports: Sequence[NodeReport], nodes: Sequence[str]) -> list[str]:
    """Nodes that said nothing, and nodes that differ from most in something, a line each."""
    silent = sorted(set(nodes) - {report.node for report in reports})
    problems = [f"{node}: its preflight left no report" for node in silent]
    names = sorted({name for report in reports for name in report.facts})
    for name in names:
        values = {report.node: report.facts.get(name, "none") for report in reports}
        usual, count = Counter(values.values()).most_common(1)[0]
        problems += [
            f"{node}: {name} is {value!r}, but {usual!r} on {count} of {len(values)} nodes"
            for node, value in values.items()
            if value != usual
        ]
    return problems


def fingerprint(model: Path) -> str:
    """Of the names and sizes of a model's files, and the content of its config: 16 hex digits."""
    seen = hashlib.sha256((model / "config.json").read_bytes())
    for path in sorted(path for path in model.rglob("*") if path.is_file()):
        seen.update(f"{path.relative_to(model)} {path.stat().st_size}\n".encode())
    return seen.hexdigest()[:16]


def run_folder_gib(config: Config) -> float:
    """What its checkpoints, one that is being written and the exported model will take there."""
    if config.model.path is None:
        return RUN_FOLDER_NEEDED_GIB
    num_bytes = sum(path.stat().st_size for path in config.model.path.glob("*.safetensors"))
    copies = config.checkpoint.keep_last + 1
    return RUN_FOLDER_NEEDED_GIB + num_bytes * (1 + CHECKPOINT_OVER_MODEL * copies) / GIB


def gpu_problems(rows: Sequence[Mapping[str, str]], expected: int) -> list[str]:
    """`rows` are what nvidia-smi says of each GPU."""
    problems = []
    if len(rows) != expected:
        problems.append(
            f"GPUs: the driver shows {len(rows)}, the job has {expected} on each node: drain this "
            "node, or submit with another --gpus-per-node"
        )
    for row in rows:
        used_mib = float(row["memory.used"])
        if used_mib > GPU_BUSY_MIB:
            problems.append(
                f"GPU {row['index']}: {used_mib:.0f} MiB are in use before the job has started; "
                "end what holds them (nvidia-smi names it)"
            )
    return problems


def _nvidia_smi() -> tuple[list[dict[str, str]], str]:
    """A row for each GPU, or what is wrong with the driver."""
    fields = ("index", "name", "driver_version", "memory.used")
    query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return [], "driver: no nvidia-smi on this node"
    except subprocess.TimeoutExpired:
        return [], f"driver: nvidia-smi did not answer within {NVIDIA_SMI_TIMEOUT_S:.0f} s"
    if answer.returncode:
        words = " ".join((answer.stdout + answer.stderr).split())
        return [], f"driver: nvidia-smi ended with {answer.returncode}: {words}"
    reader = csv.DictReader(answer.stdout.splitlines(), fields, skipinitialspace=True)
    return list(reader), ""


def _space(folder: Path, needed_gib: float, what_for: str) -> list[str]:
    free_gib = shutil.disk_usage(folder).free / GIB
    if free_gib >= needed_gib:
        return []
    return [f"{folder}: {free_gib:.1f} GiB free, {what_for} may take {needed_gib:.1f} GiB"]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
