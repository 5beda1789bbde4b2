"""Everything of a run that can be found wrong before its first process starts.

`check_inputs` looks at what the user wrote and brought (prompt, data, model), `check_machine` at
what the run is to run on. Both leave nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError
from megatron_magistral.data_check import check_lengths, read_data
from megatron_magistral.doctor import RL_ONLY, Health, examine, failures, megatron
from megatron_magistral.prompts import load_template
from megatron_magistral.run_folder import RunFolder

# sun_path of unix(7), less its closing zero.
MAX_SOCKET_PATH_BYTES = 107
MAX_PORT = 65535


class Refused(RuntimeError):
    """The machine does not allow the run; nothing was started."""


@dataclass(frozen=True)
class Inputs:
    """What the check of a run's inputs found out."""

    context_length: int
    """Tokens that prompt and completion may have together."""
    warnings: tuple[str, ...]
    """What is unusual though usable."""


def check_inputs(config: Config) -> Inputs:
    """Prompt file, data files, model directory and the ports that the config fixes.

    Raises ConfigError with a line for each thing that is wrong.
    """
    data, problems, warnings = read_data(config)
    problems += [*_check_prompt(config), *_check_ports(config)]
    length = 0
    try:
        length = _context_length(config)
    except ConfigError as error:
        problems.append(str(error))
    # Lengths can be told of a model and a prompt that are right, and not before they are.
    if not problems and config.model.path is not None:
        problems += check_lengths(config, data, length)
    if problems:
        raise ConfigError("\n".join(problems))
    if (trainer := megatron()).health is Health.NOTE:
        warnings = [*warnings, str(trainer)]
    return Inputs(length, tuple(warnings))


def check_machine(config: Config) -> None:
    """Raises Refused with the doctor's words when a role of the run could not run here."""
    if found := machine_problems(config, fixed_ports(config)):
        raise Refused("\n".join(found))


def machine_problems(config: Config, ports: Sequence[int]) -> list[str]:
    """What of this machine keeps a role of the run from running; generators want these `ports`."""
    generates = config.rl is not None or config.selects
    found = failures(examine(ports if generates else ()))
    return [str(item) for item in found if generates or item.name not in RL_ONLY]


def run_folder_pattern(config: Config) -> RunFolder:
    """The run folder as it will be called, with letters for the time."""
    return RunFolder((config.run.directory / f"{config.run.name}-YYYYMMDD-HHMMSS").resolve())


def make_run_folder(config: Config) -> RunFolder:
    """Raises Refused if there can be none."""
    num_bytes = len(os.fsencode(run_folder_pattern(config).verifier_socket))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise Refused(
            f"run.directory = {config.run.directory}: the path of a socket in the run folder would "
            f"have {num_bytes} bytes; at most {MAX_SOCKET_PATH_BYTES} are possible, so choose a "
            "shorter run.directory or run.name"
        )
    try:
        return RunFolder.create(config)
    except OSError as error:
        raise Refused(
            f"run.directory = {config.run.directory}: no folder can be made there: {error.strerror}"
        ) from error


def fixed_ports(config: Config) -> list[int]:
    """The ports that the config wants for its generators; none if it takes free ones."""
    first = config.generator.port
    return list(range(first, first + config.generator.num_replicas)) if first else []


def _context_length(config: Config) -> int:
    """Raises ConfigError when the config's own model does not fit the config, or is damaged."""
    if config.model.shape is not None:
        return config.model.shape.context_length
    assert config.model.path is not None
    # Costs seconds (transformers), which only a run that brings a model should pay.
    from megatron_magistral.model_check import check_model
    from megatron_magistral.weights.hf_dir import open_weights

    try:
        arch = check_model(config, config.model.path)
        open_weights(config.model.path, arch)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"model.path = {config.model.path}: {reason}") from error
    return arch.max_position_embeddings


def _check_prompt(config: Config) -> list[str]:
    path = config.data.prompt_file
    try:
        load_template(path)
    except UnicodeDecodeError:
        return [f"data.prompt_file = {path}: is not UTF-8 text"]
    except OSError as error:
        return [f"data.prompt_file = {path}: cannot be read: {error.strerror}"]
    except ValueError as error:
        return [f"data.{error}"]
    return []


def _check_ports(config: Config) -> list[str]:
    last = max(fixed_ports(config), default=0)
    if last <= MAX_PORT:
        return []
    return [
        f"generator.port = {config.generator.port}: the last of {config.generator.num_replicas} "
        f"ports would be {last}; at most {MAX_PORT} is possible"
    ]
