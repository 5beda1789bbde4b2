"""The Python zygote: a warm interpreter that forks once per test.

It runs under the system's interpreter as `python -c`, with nothing of ours importable, so it needs
the standard library alone and Python 3.9. It holds no test data: a submission sees this module,
but the only thing in it is its own input. The wire is `wire.h`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
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
RUN = struct.Struct("<IIQQ")
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
set_any_limit = resource.setrlimit
leave = os._exit
flush_c_library = libc.fflush  # looked up once, not in every child


def confine(filter_code: bytes, cpu_s: int, output_bytes: int, max_tasks: int) -> None:
    """What the launcher does for C++ programs between clone and exec, less what we inherit."""
    set_any_limit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    set_any_limit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
    if max_tasks:
        set_any_limit(resource.RLIMIT_NPROC, (max_tasks, max_tasks))
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
        raw.name = f"<{name}>"
        buffered = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
        errors = "backslashreplace" if fd == 2 else "surrogateescape"
        stream = io.TextIOWrapper(buffered, "utf-8", errors, line_buffering=fd == 2)
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, "__" + name + "__", stream)


def set_limit(number: int, limits: tuple[int, int]) -> None:
    """`resource.setrlimit`, but a stack beyond the hard limit becomes the largest there is.

    Programs ask for an endless one before they recurse, and do not expect to be refused.
    """
    if number == resource.RLIMIT_STACK:
        hard = resource.getrlimit(number)[1]
        soft, new_hard = (limit if 0 <= limit < hard else hard for limit in limits)
        limits = (soft, new_hard)
    set_any_limit(number, limits)


def execute(source: bytes) -> int:
    """Runs the source as `__main__` and returns the exit status that an interpreter would."""
    module = types.ModuleType("__main__")
    namespace = module.__dict__
    namespace.update(__builtins__=builtins, __file__="solution.py", __cached__=None)
    sys.modules["__main__"] = module
    del module
    # Until 3.11 calls of C functions counted as well, here exec.
    ours = depth_of_caller() + (sys.version_info < (3, 12))
    sys.setrecursionlimit(sys.getrecursionlimit() + ours)
    try:
        exec(compile(source, "solution.py", "exec", dont_inherit=True), namespace)
    except SystemExit as stop:
        return exit_status(stop)
    except BaseException:  # whatever a submission raises is its own failure, not ours
        return report_exception()
    return 0


def depth_of_caller() -> int:
    """How many frames of ours count against the submission's recursion limit."""
    frame, depth = sys._getframe(1), 0
    while frame:
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return depth


def report_exception() -> int:
    """The excepthook prints the exception being handled, or decides the status by exiting."""
    try:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    except SystemExit as stop:
        return exit_status(stop)
    except BaseException:  # a broken hook of the submission's: nothing is printed
        pass
    return 1


def exit_status(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if not isinstance(stop.code, int):
        return 1
    code = int.__index__(stop.code)  # whatever a subclass makes of its operators
    return code & 0xFF if abs(code) < 1 << 63 else 0xFF


def finish(status: int) -> int:
    """What an interpreter does between the last statement and the end of the process.

    Threads and exit handlers first, then every object of the submission goes: finalizers may
    print, and files write what they hold. Returns the exit status.
    """
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):  # a failing handler: an interpreter goes on too
            step()
    is_flushed = flush(sys.stdout, sys.stderr)
    for name in ("stdin", "stdout", "stderr"):  # whatever stood in for them goes as well
        setattr(sys, name, getattr(sys, f"__{name}__", None))
    sys.modules.pop("__main__", None)
    gc.collect()
    flush(sys.stdout, sys.stderr)
    flush(*filter(is_writer, gc.get_objects()))  # what other modules still hold
    flush_c_library(None)
    return status or (0 if is_flushed else 120)


def is_writer(candidate: object) -> bool:
    return issubclass(type(candidate), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom))


def flush(*streams: object) -> bool:
    """Whether none of them failed."""
    is_flushed = True
    for stream in streams:
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()  # type: ignore[attr-defined]
        except BrokenPipeError:  # the other side of an interaction has left, and needs no more
            pass
        except BaseException:  # no room for the output, or a method of the submission's
            is_flushed = False
    return is_flushed


def become_program(filter_code: bytes, message: bytes, fds: list[int]) -> bytes:
    """Confines this child of the zygote. Returns the source that it is to run."""
    run_id, cpu_s, output_bytes, max_tasks = RUN.unpack(message)
    source = read_all(fds[0])
    os.dup2(CONTROL_FD, REPORT_FD)
    # A domain of its own inside ours: no child may look into another, nor into the zygote.
    alone = libc.syscall(LANDLOCK_RESTRICT_SELF, RULESET_FD, 0)
    place(fds)
    try:
        if alone != 0:
            raise OSError(ctypes.get_errno(), "Landlock")
        confine(filter_code, cpu_s, output_bytes, max_tasks)
    except OSError as error:
        report = socket.socket(fileno=REPORT_FD)
        report.send(EVENT.pack(FAILED, run_id, 0, error.errno or 0, 0, 0))
        leave(127)
    os.close(REPORT_FD)
    fresh_streams()
    return source


def serve(control: socket.socket, filter_code: bytes) -> bytes:
    """Forks a child for every run, until the launcher closes the socket.

    Returns in the children alone, each with the source that it is to run: no frame of ours lies
    below a submission's but the module's own.
    """
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (run id, pid)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != CONTROL_FD:
                poll.unregister(fd)
                reap(control, fd, *running.pop(fd))
                continue
            message, fds, _, _ = socket.recv_fds(control, RUN.size, 5)
            if not message:
                leave(0)
            run_id = RUN.unpack(message)[0]
            pid, pidfd = fork(control, run_id)
            if pid == 0:
                source = become_program(filter_code, message, fds)
                control.detach()  # its number is the program's now
                return source
            for passed in fds:
                os.close(passed)
            if pidfd >= 0:
                running[pidfd] = (run_id, pid)
                poll.register(pidfd, select.POLLIN)


def fork(control: socket.socket, run_id: int) -> tuple[int, int]:
    """The child's pid and pidfd; pid 0 in the child, pidfd -1 where there is none."""
    try:
        pid = os.fork()
    except OSError as error:  # the machine has no room for another process
        control.send(EVENT.pack(FAILED, run_id, 0, error.errno or 0, 0, 0))
        return -1, -1
    if pid == 0:
        return 0, -1
    pidfd = os.pidfd_open(pid)
    socket.send_fds(control, [EVENT.pack(STARTED, run_id, pid, 0, 0, 0)], [pidfd])
    return pid, pidfd


def reap(control: socket.socket, pidfd: int, run_id: int, pid: int) -> None:
    _, status, usage = os.wait4(pid, 0)
    os.close(pidfd)
    cpu_ns = round((usage.ru_utime + usage.ru_stime) * 1e9)
    control.send(EVENT.pack(EXITED, run_id, pid, status, cpu_ns, usage.ru_maxrss * 1024))


def main() -> bytes:
    """Serves; returns in children, as `serve` does."""
    # Inherited by every child: /proc/PID/fd of one is closed to another of the same user.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    _, deepest = resource.getrlimit(resource.RLIMIT_STACK)  # low until here, as for startup.c
    set_any_limit(resource.RLIMIT_STACK, (deepest, deepest))
    resource.setrlimit = set_limit
    control = socket.socket(fileno=CONTROL_FD)
    filter_code = control.recv(1 << 16)
    sys.path[:] = [path for path in sys.path if path]
    sys.argv[:] = ["solution.py"]
    for name in WARM_MODULES.split():
        __import__(name)
    gc.collect()
    gc.freeze()
    control.send(EVENT.pack(READY, 0, 0, 0, 0, 0))
    return serve(control, filter_code)


if __name__ == "__main__":
    status = 127
    try:
        status = finish(execute(main()))
    finally:
        leave(status)
