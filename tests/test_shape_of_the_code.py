"""The rules that keep the code readable: sizes, who may import what, and no broad excepts."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("megatron_magistral", "verifier_sandbox", "benchmarks")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# A part may import those to its right, and nothing to its left.
LAYERS = (
    {"cli", "launcher", "slurm"},
    {"prepare", "selection", "preflight", "model_check", "data_check", "doctor", "display"},
    {"role_commands"},
    {"rollout.role", "trainer.role"},
    {"trainer", "rollout", "evals", "analysis", "weights"},
    {"data", "cluster", "restart_requests", "signals", "warden", "metrics", "run_folder"}
    | {"jsonl", "prompt_room"},
    {"config", "config_file"},
    {"config_curriculum", "config_engines", "config_kv", "config_stages"},
    {"algorithm", "rewards", "prompts", "trainer.settings", "weights.settings"},
    {"types"},
)
PURE = ("algorithm", "rewards", "types")
PURE_MAY_NOT_IMPORT = {"torch.distributed", "os", "socket", "subprocess", "asyncio", "httpx"}


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node


def ours(path: Path) -> bool:
    return path.is_relative_to(ROOT / "megatron_magistral")


@pytest.mark.parametrize("path", FILES, ids=names)
def test_a_file_is_short(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", FILES, ids=names)
def test_a_function_is_short(path):
    long = [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_only_the_files_that_are_named_after_it_import_megatron():
    users = [
        names(path)
        for path in FILES
        if any(m.split(".")[0] == "megatron" for m, _ in imports(path))
    ]
    assert users == [
        "megatron_magistral/trainer/megatron.py",
        "megatron_magistral/trainer/megatron_backend.py",
        "megatron_magistral/trainer/megatron_checkpoint.py",
        "megatron_magistral/trainer/megatron_layers.py",
    ]


def test_only_the_server_process_imports_sglang():
    users = {
        names(path) for path in FILES if any(m.split(".")[0] == "sglang" for m, _ in imports(path))
    }
    assert users <= {"megatron_magistral/rollout/sglang_plugin.py"}


def test_the_sandbox_stands_alone():
    for path in (ROOT / "verifier_sandbox").rglob("*.py"):
        for module, _ in imports(path):
            assert module.split(".")[0] not in {"megatron_magistral", "torch"}, names(path)


@pytest.mark.parametrize("part", PURE)
def test_the_pure_core_does_no_input_or_output(part):
    for path in FILES:
        if ours(path) and path.relative_to(ROOT / "megatron_magistral").parts[0].startswith(part):
            assert not PURE_MAY_NOT_IMPORT & {module for module, _ in imports(path)}, names(path)


def layer_of(module: str) -> int | None:
    """The layer of a module of ours, by its longest known prefix."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for level, layer in enumerate(LAYERS):
            if prefix in layer:
                return level
    return None


@pytest.mark.parametrize("path", [path for path in FILES if ours(path)], ids=names)
def test_arrows_go_down_only(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    level = layer_of(module)
    if level is None:
        return
    up = [
        target
        for target, _ in imports(path)
        if target.startswith("megatron_magistral.")
        and (target_level := layer_of(target)) is not None
        and target_level < level
    ]
    assert up == []


@pytest.mark.parametrize("path", FILES, ids=names)
def test_a_broad_except_says_why(path):
    """Allowed at a worker's edge alone, and there with a comment beside it."""
    lines = path.read_text().splitlines()
    broad = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"})
    ]
    unexplained = [n for n in broad if not any("#" in line for line in lines[n - 2 : n + 1])]
    assert unexplained == []
