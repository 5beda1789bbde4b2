"""Landlock rulesets: which files a confined process may open.

A ruleset denies everything it handles (files, and TCP, signals and abstract sockets on newer
kernels) except beneath the paths named. Rights are masked by the version that the kernel reports,
because userland is often newer than the kernel it runs on.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from verifier_sandbox.jail.syscalls import SYSCALLS

_CREATE_RULESET, _ADD_RULE = SYSCALLS["landlock_create_ruleset"], SYSCALLS["landlock_add_rule"]
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# version -> every file-system right the kernel knows; rights it knows and no rule grants are denied
_KNOWN_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_KNOWN_RIGHTS_NOW = (1 << 16) - 1
_ALL_TCP, _ALL_SCOPES = 0b11, 0b11


def version() -> int:
    """The Landlock version of this kernel; 0 where it is missing or switched off."""
    return max(0, _call(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION))


def create_ruleset(
    readable: Sequence[Path] = (), writable: Sequence[Path] = (), devices: Sequence[Path] = ()
) -> int:
    """Returns the descriptor (close-on-exec) of a ruleset; the caller closes it.

    `readable` may be read and executed, `writable` also changed, `devices` read and written.
    Paths that do not exist are skipped. Raises OSError if the kernel has no Landlock.
    """
    kernel = version()
    known = _KNOWN_RIGHTS.get(kernel, _KNOWN_RIGHTS_NOW)
    fields = [known]
    if kernel >= 4:
        fields.append(_ALL_TCP)
    if kernel >= 6:
        fields.append(_ALL_SCOPES)
    attribute = struct.pack(f"<{len(fields)}Q", *fields)
    ruleset = _call(_CREATE_RULESET, attribute, len(attribute), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    os.set_inheritable(ruleset, False)
    device_rights = _READ_FILE | _WRITE_FILE | _TRUNCATE
    try:
        for paths, rights in ((readable, _READ), (writable, known), (devices, device_rights)):
            for path in paths:
                _allow_beneath(ruleset, path, rights & known)
    except OSError:
        os.close(ruleset)
        raise
    return ruleset


def _allow_beneath(ruleset: int, path: Path, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("<Qi", rights, parent)
        if _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0) < 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule for {path}")
    finally:
        os.close(parent)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(number, *arguments))
