"""Roles find each other by files on the shared filesystem: <folder>/<role>-<index> holds a URL.

Nothing has to be known of host names or free ports before the roles are placed, and there is no
service that could be down. The folder belongs to one attempt, so an address is never stale; a role
that is restarted in its attempt keeps its own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from megatron_magistral.cluster import free_ports
from megatron_magistral.run_folder import RunFolder
from megatron_magistral.slurm.plan import JobPlan, RoleName, attempt_folder

POLL_S = 0.5
DISCARD_PORT = 9


class AddressTimeout(RuntimeError):
    """Roles that did not say where they are; names them and their nodes."""


class AddressBook:
    """The addresses of one phase of an attempt: a stage, or the preflight."""

    def __init__(self, run: RunFolder, plan: JobPlan, phase: str) -> None:
        self._plan = plan
        self._folder = attempt_folder(run, plan.attempt) / phase
        self._folder.mkdir(exist_ok=True)

    def publish(self, role: RoleName, index: int, address: str) -> None:
        """Readers see the whole address or none."""
        draft = self._folder / f".{role}-{index}.{socket.gethostname()}.{os.getpid()}"
        draft.write_text(address, encoding="utf-8")
        draft.replace(self._folder / f"{role}-{index}")

    def wait(self, role: RoleName, count: int, timeout_s: float) -> list[str]:
        """The addresses of the first `count` tasks of a role, in order.

        Raises AddressTimeout with those that are missing.
        """
        wanted = [f"{role}-{index}" for index in range(count)]
        begin = time.monotonic()
        while True:
            # A listing is asked of the file server; the absence of one name may be cached.
            there = {entry.name for entry in os.scandir(self._folder)}
            missing = [index for index, name in enumerate(wanted) if name not in there]
            if not missing:
                return [(self._folder / name).read_text(encoding="utf-8") for name in wanted]
            after_s = time.monotonic() - begin
            if after_s > timeout_s:
                who = ", ".join(f"{i} on {self._plan.at(role, i).node}" for i in missing)
                raise AddressTimeout(
                    f"{role} {who}: no address in {self._folder} after {after_s:.0f} s"
                )
            time.sleep(POLL_S)

    def rendezvous(self, rank: int, host: str, timeout_s: float) -> tuple[str, int]:
        """Address and port at which rank 0, whose `host` this is, waits for the other ranks.

        Raises AddressTimeout if it does not say.
        """
        if rank == 0:
            self.publish(RoleName.TRAINER, 0, f"{host}:{free_ports(1, host)[0]}")
        (address,) = self.wait(RoleName.TRAINER, 1, timeout_s)
        first, _, port = address.rpartition(":")
        return first, int(port)


def own_address(environment: Mapping[str, str]) -> str:
    """The IP address of this node on its way to the node of the batch script.

    Asked of the routing table, with a datagram socket that sends nothing: names of nodes need not
    resolve, and of several interfaces it is the one that the nodes reach each other by. Set
    MAGISTRAL_ADDRESS where that is not the right one.
    """
    if chosen := environment.get("MAGISTRAL_ADDRESS"):
        return chosen
    first = environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first, DISCARD_PORT))
        return str(probe.getsockname()[0])
