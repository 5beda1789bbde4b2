"""Reading and writing a config: YAML, dotted overrides, and one line of error for each problem."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_magistral.config import Config
from megatron_magistral.config_stages import Section


class ConfigError(ValueError):
    """A config that cannot run. One line a problem."""


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `a.b=value` overrides (values are YAML), validate.

    Raises ConfigError with a line for each problem.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, not {type(raw).__name__}")
    for override in overrides:
        _apply(raw, override)
    return parse(raw, base=path.parent)


def parse(raw: dict[str, Any], base: Path = Path()) -> Config:
    """Validate a mapping. Relative paths of the data and model sections count from `base`."""
    try:
        config = Config.model_validate(_absolute_paths(raw, base))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from error
    _check_files(config)
    return config


def dump(config: Config) -> str:
    """The resolved config as YAML that `load` reads back to the same value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


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
    for section, keys in (
        ("model", ("path",)),
        ("data", ("train", "held_out", "traces", "prompt_file")),
    ):
        values = raw.get(section)
        if isinstance(values, dict):
            resolved[section] = values | {
                key: str((base / values[key]).resolve())
                for key in keys
                if isinstance(values.get(key), str)
            }
    return resolved


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
        annotation = section.model_fields[part].annotation
        options = getattr(annotation, "__args__", (annotation,))
        section = next(o for o in options if isinstance(o, type) and issubclass(o, Section))
    return ", ".join(section.model_fields)


def _check_files(config: Config) -> None:
    problems = []
    model = config.model.path
    if model is not None and not (model / "config.json").is_file():
        problems.append(f"model.path = {model}: no Hugging Face model there (no config.json)")
    for key in ("train", "held_out", "traces", "prompt_file"):
        path = getattr(config.data, key)
        if path is not None and not path.is_file():
            problems.append(f"data.{key} = {path}: no such file")
    if problems:
        raise ConfigError("\n".join(problems))
