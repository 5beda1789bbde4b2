"""Files that a command is told to write: what can be refused is refused before any work."""

from __future__ import annotations

import os
from pathlib import Path


def check_output_file(option: str, path: Path | None) -> None:
    """Raises ValueError if `path`, as given for `option`, cannot be written."""
    if path is None:
        return
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: no such directory")
    if path.is_dir():
        raise ValueError(f"{option} {path}: a directory, must be a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {path}: cannot be written")
