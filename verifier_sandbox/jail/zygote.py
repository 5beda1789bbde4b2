"""The Python zygote: a warm interpreter that forks once per test.

It runs under the system's interpreter as `python -c`, with nothing of ours importable, so it needs
the standard library alone and Python 3.8. It holds no test data: a submission sees this module's
frames, but the only thing in them is its own input. The wire is `wire.h`.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import io
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import types

CONTROL_FD, RULESET_FD, REPORT_FD = 3, 4, 60
READY, STARTED, EXITED, FAILED = 1, 2, 3, 4
OWN_PID = b"\x57\x1e\x0d\x7f"
LANDLOCK_RESTRICT_SELF = 446
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 4, 22, 2
RUN = struct.Struct("<IIQ")
EVENT = struct.Struct("<IIiiQQ")
WARM_MODULES = (
    "array bisect collections copy datetime decimal fractions functools heapq inspect io itertools "
    "json math operator queue random re statistics string threading time traceback typing"
)


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


libc = ctypes.PyDLL(None, use_errno=True)
ZYGOTE_PID = os.getpid()
ZYGOTE_MODULE = sys.modules[__name__]  # stays alive when a submission takes the name __main__


def confine(filter_code: bytes, cpu_s: int, output_bytes: int) -> None:
    """What the launcher does for C++ programs between clone and exec, less what we inherit."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
    pid = os.getpid()
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != ZYGOTE_PID:
        raise OSError(ctypes.get_errno(), "PDEATHSIG")
    code = bytearray(filter_code)
    for at in range(4, len(code), 8):
        if code[at : at + 4] == OWN_PID:
            code[at : at + 4] = struct.pack("<I", pid)
    buffer = (ctypes.c_char * len(code)).from_buffer(code)
    program = Program(len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def place(fds: list[int]) -> None:
    """Puts stdin, stdout and aux files at 0, 1, 3, 4 and closes all else below REPORT_FD."""
    _, stdin, stdout, *aux = (os.dup2(fd, 20 + i, False) for i, fd in enumerate(fds))
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.closerange(3, 20)
    for target, fd in enumerate(aux, 3):
        os.dup2(fd, target)
    os.closerange(3 + len(aux), REPORT_FD)


def read_all(fd: int) -> bytes:
    source = bytearray(os.fstat(fd).st_size)
    os.preadv(fd, [source], 0)
    return bytes(source)


def fresh_streams() -> None:
    """The zygote's own streams remember facts about the files that were there before."""
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        raw = io.FileIO(fd, mode, closefd=False)
        buffered = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
        errors = "backslashreplace" if fd == 2 else "surrogateescape"
        stream = io.TextIOWrapper(buffered, "utf-8", errors, line_buffering=fd == 2)
        setattr(sys, name, stream)
        setattr(sys, "__" + name + "__", stream)


def execute(source: bytes) -> int:
    """Runs the source as `__main__` and returns the exit status that an interpreter would."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    status = 0
    try:
        exec(compile(source, "solution.py", "exec", dont_inherit=True), main_module.__dict__)
    except SystemExit as stop:
        status = exit_status(stop.code)
    except BaseException:  # whatever a submission raises is its own failure, not ours
        sys.excepthook(*sys.exc_info())
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # an exit handler of the submission failed: Python ignores that too
        pass
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = status or 120
    return status


def exit_status(code: object) -> int:
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def run_child(
    control: socket.socket,
    fds: list[int],
    filter_code: bytes,
    run_id: int,
    cpu_s: int,
    output_bytes: int,
) -> None:
    source = read_all(fds[0])
    os.dup2(CONTROL_FD, REPORT_FD)
    # A domain of its own inside ours: no child may look into another, nor into the zygote.
    alone = libc.syscall(LANDLOCK_RESTRICT_SELF, RULESET_FD, 0)
    place(fds)
    try:
        if alone != 0:
            raise OSError(ctypes.get_errno(), "Landlock")
        confine(filter_code, cpu_s, output_bytes)
    except OSError as error:
        report = socket.socket(fileno=REPORT_FD)
        report.send(EVENT.pack(FAILED, run_id, 0, error.errno or 0, 0, 0))
        os._exit(127)
    os.close(REPORT_FD)
    control.detach()
    fresh_streams()
    os._exit(execute(source))


def serve(control: socket.socket, filter_code: bytes) -> None:
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (run id, pid)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == CONTROL_FD:
                message, fds, _, _ = socket.recv_fds(control, RUN.size, 5)
                if not message:
                    return
                start(control, filter_code, message, fds, running, poll)
            else:
                poll.unregister(fd)
                reap(control, fd, *running.pop(fd))


def start(
    control: socket.socket,
    filter_code: bytes,
    message: bytes,
    fds: list[int],
    running: dict[int, tuple[int, int]],
    poll: select.poll,
) -> None:
    run_id, cpu_s, output_bytes = RUN.unpack(message)
    pid = os.fork()
    if pid == 0:
        try:
            run_child(control, fds, filter_code, run_id, cpu_s, output_bytes)
        finally:
            os._exit(127)
    pidfd = os.pidfd_open(pid)
    socket.send_fds(control, [EVENT.pack(STARTED, run_id, pid, 0, 0, 0)], [pidfd])
    for fd in fds:
        os.close(fd)
    running[pidfd] = (run_id, pid)
    poll.register(pidfd, select.POLLIN)


def reap(control: socket.socket, pidfd: int, run_id: int, pid: int) -> None:
    _, status, usage = os.wait4(pid, 0)
    os.close(pidfd)
    cpu_ns = round((usage.ru_utime + usage.ru_stime) * 1e9)
    control.send(EVENT.pack(EXITED, run_id, pid, status, cpu_ns, usage.ru_maxrss * 1024))


def main() -> None:
    # Inherited by every child: /proc/PID/fd of one is closed to another of the same user.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    control = socket.socket(fileno=CONTROL_FD)
    filter_code = control.recv(1 << 16)
    sys.path[:] = [path for path in sys.path if path]
    sys.argv[:] = ["solution.py"]
    for name in WARM_MODULES.split():
        __import__(name)
    gc.collect()
    gc.freeze()
    control.send(EVENT.pack(READY, 0, 0, 0, 0, 0))
    serve(control, filter_code)


if __name__ == "__main__":
    main()
