"""A SLURM of one's own: munged, slurmctld and several slurmd on this machine, in one directory.

Needs Debian's packages `slurm-wlm` and `munge`, and no systemd, cgroups or accounting. Several
slurmd run on one host under the names node1, node2, ...; each believes that it has plenty of cores
and two GPUs, which are empty files. The last of them does not see what is in `not_on_last`: its
slurmd has a mount namespace of its own. A requeued job waits for old credentials to expire, hence
their short life here.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from megatron_magistral.cluster import PR_SET_PDEATHSIG

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
START_TIMEOUT_S = 60.0
POLL_S = 0.5
NODE_CPUS = 16
NODE_GPUS = 2
# For slurmd of the last node: hide a directory, then go on as it.
BLIND = 'mount -t tmpfs none "$1" && shift && exec "$@"'

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=1,default_queue_depth=10
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=node[1-{num_nodes}] NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:{gpus} \
Port={ports}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
"""


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """A test run that is killed leaves no daemon behind."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


class SlurmCluster:
    """A context manager: leaving it ends every daemon and every job."""

    def __init__(self, root: Path, num_nodes: int) -> None:
        self.root = root
        self.num_nodes = num_nodes
        self.not_on_last = root / "not_on_last"
        self.environment = dict(os.environ) | {"SLURM_CONF": str(root / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        ports = free_port_range(self.num_nodes + 1)
        (self.root / "state").mkdir(parents=True)
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        text = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            root=self.root,
            control_port=ports[0],
            num_nodes=self.num_nodes,
            ports=f"[{ports[1]}-{ports[-1]}]",
            cpus=NODE_CPUS,
            gpus=NODE_GPUS,
        )
        self.not_on_last.mkdir()
        files = [self.root / f"gpu{index}" for index in range(NODE_GPUS)]
        for path in files:
            path.touch()
        (self.root / "gres.conf").write_text("".join(f"Name=gpu File={path}\n" for path in files))
        (self.root / "slurm.conf").write_text(text)
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _start(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
        files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        options = [f"--{name}={self.root / file}" for name, file in files.items()]
        # --force: a directory of a test is writable by more than munged likes.
        self._daemon("munged", "--force", "--foreground", *options)
        self._until("munged", (self.root / "munge.sock").exists)
        self._daemon("slurmctld", "-D")
        for number in range(1, self.num_nodes + 1):
            (self.root / f"spool-node{number}").mkdir()
            slurmd = ("slurmd", "-D", "-N", f"node{number}")
            if number == self.num_nodes:
                blind = ("sh", "-c", BLIND, "sh", str(self.not_on_last))
                slurmd = ("unshare", "--mount", *blind, *slurmd)
            self._daemon(*slurmd)
        self._until("slurmd", lambda: self.run("sinfo", "-h", "-o", "%T %D") == self._all_idle)

    @property
    def _all_idle(self) -> str:
        return f"idle {self.num_nodes}"

    def _daemon(self, *command: str) -> None:
        with (self.root / f"daemon{len(self._daemons)}.out").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            )

    def _until(self, who: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"{who} does not start: {self.logs()}"
            assert all(d.poll() is None for d in self._daemons), f"{who}: {self.logs()}"
            time.sleep(POLL_S)

    def _end(self) -> None:
        if len(self._daemons) > 1:
            subprocess.run(
                ("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}"),
                env=self.environment,
                timeout=30,
                check=False,
                capture_output=True,
            )
        processes = self._of_this_cluster()
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        psutil.wait_procs(processes, timeout=10)
        for process in self._of_this_cluster():
            process.kill()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def _of_this_cluster(self) -> list[psutil.Process]:
        """Every process of its daemons and jobs: they all inherit SLURM_CONF."""
        mark = self.environment["SLURM_CONF"]
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURM_CONF") == mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def processes(self, mark: str) -> list[psutil.Process]:
        """Processes of jobs with `mark` in their command lines."""
        found = []
        for process in self._of_this_cluster():
            try:
                if any(mark in word for word in process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def run(self, *command: str, **variables: str) -> str:
        """Standard output of one of SLURM's commands."""
        done = subprocess.run(
            command,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, cwd: Path, **variables: str) -> int:
        """The id of the new job."""
        command = ("sbatch", "--parsable", f"--chdir={cwd}", *arguments)
        done = subprocess.run(
            command,
            env=self.environment | variables,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, job_id: int) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts, ..."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job_id))
        return dict(item.split("=", 1) for item in shown.split() if "=" in item)

    def wait(self, job_id: int, states: Collection[str], timeout_s: float) -> dict[str, str]:
        """As `job`, once the job is in one of these states."""
        deadline = time.monotonic() + timeout_s
        while (job := self.job(job_id))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {job_id} is {job['JobState']} for too long"
            time.sleep(POLL_S)
        return job

    def logs(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.root.glob("*.out"))
        )


def free_port_range(count: int) -> list[int]:
    """Consecutive ports of the loopback interface that nobody listens on now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        ports = list(range(first, first + count))
        if ports[-1] < 65536 and all(map(is_free, ports)):
            return ports


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
