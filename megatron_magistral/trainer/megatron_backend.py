"""What training runs on: Megatron's version, the packages that it found, the device.

Megatron looks for Transformer Engine and apex when it is imported. What it found then is used and
said at the start; nothing asks again.
"""

# ruff: noqa: E402 (Megatron is imported after the CPU compatibility hook)

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import metadata

import torch

from megatron_magistral.trainer import cpu

cpu.install()

from megatron.core.optimizer import Adam

from megatron_magistral.trainer.megatron_layers import USES_TRANSFORMER_ENGINE
from megatron_magistral.trainer.versions import Support, megatron_support

log = logging.getLogger(__name__)


class BackendError(RuntimeError):
    """Megatron-core is too old."""


@dataclass(frozen=True)
class Backend:
    megatron_core: str
    support: Support
    layers: str
    adam: str
    device: str

    def __str__(self) -> str:
        return (
            f"megatron-core {self.megatron_core}, layers by {self.layers}, Adam by {self.adam}, "
            f"torch {torch.__version__} on {self.device}"
        )

    def announce(self) -> None:
        """Says in the log what was found, and whether it was tested."""
        log.info("%s", self)
        if self.support is Support.UNTESTED:
            log.warning("megatron-core %s: %s", self.megatron_core, self.support.remedy)


def find_backend() -> Backend:
    """Raises BackendError if Megatron-core is too old."""
    version = metadata.version("megatron-core")
    support = megatron_support(version)
    if support is Support.TOO_OLD:
        raise BackendError(f"megatron-core {version}: {support.remedy}")
    engine = _with_version("transformer_engine") if USES_TRANSFORMER_ENGINE else "Megatron itself"
    package = Adam.__module__.split(".")[0]
    adam = "ours" if Adam is cpu.Adam else _with_version(package)
    device = "the CPU over gloo" if cpu.is_cpu() else f"{torch.cuda.get_device_name()} over NCCL"
    return Backend(version, support, engine, adam, device)


def _with_version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:  # built from source, under another name
        return package
