"""Reading and writing a config: YAML, a base that a file builds on, dotted overrides, and one line
of error for each problem.

    base: ../small_rl.yaml
    rl: {algorithm: {eps_high: 0.2}}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_magistral.config import Config
from megatron_magistral.config_section import Section

BASE_KEY = "base"
DATA_FILES = ("train", "held_out", "traces", "prompt_file")


class ConfigError(ValueError):
    """A config that cannot run. One line a problem."""


def load(path: Path, overrides: Sequence[str] = (), *, check_files: bool = True) -> Config:
    """Read a file and what it builds on, apply `a.b=value` overrides (values are YAML), validate;
    without `check_files` also where its model and data are elsewhere, as for a plan.

    Raises ConfigError with a line for each problem.
    """
    raw = read(path)
    for override in overrides:
        _apply(raw, override)
    return parse(raw, base=path.parent, check_files=check_files)


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, not validated, but with absolute paths.

    A file with `base: FILE`, relative to itself, states only what is different there: sections are
    merged key by key, everything else is replaced, lists too. `section: null` removes one.

    Raises ConfigError for a file that cannot be read, and for files that build on each other.
    """
    return _read(path, ())


def parse(raw: dict[str, Any], base: Path = Path(), *, check_files: bool = True) -> Config:
    """Validate a mapping. Relative paths of the data and model sections count from `base`."""
    try:
        config = Config.model_validate(_absolute_paths(raw, base))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from error
    if check_files:
        _check_files(config)
    return config


def dump(config: Config) -> str:
    """The resolved config as YAML that `load` reads back to the same value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path, derived: tuple[Path, ...]) -> dict[str, Any]:
    """`derived` are the files that build on this one, the first of them the one asked for."""
    path = path.resolve()
    if path in derived:
        chain = " -> ".join(map(str, (*derived, path)))
        raise ConfigError(f"{derived[-1]}: base: files that build on each other: {chain}")
    raw = _read_mapping(path, derived)
    has_base, base = BASE_KEY in raw, raw.pop(BASE_KEY, None)
    raw = _absolute_paths(raw, path.parent)
    if not has_base:
        return raw
    if not isinstance(base, str):
        raise ConfigError(f"{path}: {BASE_KEY} = {base!r}: must be the path of one YAML file")
    return _merge(_read(path.parent / base, (*derived, path)), raw)


def _read_mapping(path: Path, derived: tuple[Path, ...]) -> dict[str, Any]:
    """What the file holds. Raises ConfigError."""
    whose = f"{derived[-1]}: {BASE_KEY}: {path}" if derived else f"{path}"
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{whose}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{whose}: is not UTF-8 text: {error.reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{whose}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{whose}: must be a mapping of sections, not {type(raw).__name__}")
    return raw


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with what `above` states differently."""
    merged = dict(below)
    for key, value in above.items():
        under = below.get(key)
        if isinstance(under, dict) and isinstance(value, dict):
            value = _merge(under, value)
        merged[key] = value
    return merged


def _apply(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{override}: an override is written section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{override}: the value is not YAML") from error
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{override}: {parent} is a value, not a section")
        node = child
    node[leaf] = value


def _absolute_paths(raw: dict[str, Any], base: Path) -> dict[str, Any]:
    resolved = dict(raw)
    for section, keys in (("model", ("path",)), ("data", DATA_FILES)):
        if isinstance(raw.get(section), dict):
            resolved[section] = _resolve(raw[section], keys, base)
    rl = raw.get("rl")
    if isinstance(rl, dict) and isinstance(rl.get("stages"), list):
        stages = [
            _resolve(stage, ("add_problems",), base) if isinstance(stage, dict) else stage
            for stage in rl["stages"]
        ]
        resolved["rl"] = rl | {"stages": stages}
    return resolved


def _resolve(values: dict[str, Any], keys: Sequence[str], base: Path) -> dict[str, Any]:
    """The same with absolute paths under `keys`."""
    return values | {
        key: str((base / values[key]).resolve()) for key in keys if isinstance(values.get(key), str)
    }


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{key}: {message}" if key else message
    if item["type"] == "missing":
        return f"{key}: is missing and has no default"
    if item["type"] == "extra_forbidden":
        return f"{key} = {item['input']!r}: unknown key; known here: {_known_keys(item['loc'])}"
    return f"{key} = {item['input']!r}: {message[0].lower()}{message[1:]}"


def _known_keys(location: tuple[Any, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        if isinstance(part, int):  # a place in a list, whose items are the section
            continue
        annotation = section.model_fields[part].annotation
        options = getattr(annotation, "__args__", (annotation,))
        section = next(o for o in options if isinstance(o, type) and issubclass(o, Section))
    return ", ".join(section.model_fields)


def _check_files(config: Config) -> None:
    problems = []
    model = config.model.path
    if model is not None and not (model / "config.json").is_file():
        problems.append(f"model.path = {model}: no Hugging Face model there (no config.json)")
    files = {f"data.{key}": getattr(config.data, key) for key in DATA_FILES}
    for index, stage in enumerate(config.rl.stages if config.rl is not None else ()):
        files[f"rl.stages.{index}.add_problems"] = stage.add_problems
    for name, path in files.items():
        if path is not None and not path.is_file():
            problems.append(f"{name} = {path}: no such file")
    if problems:
        raise ConfigError("\n".join(problems))
