"""Which system calls each kind of program may make, and why.

What no rule names answers EPERM: a program that tries `system("pause")` or `sched_setscheduler`
fails at that call and goes on. What only an attack would try kills the process, and the judge
reports SECURITY.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verifier_sandbox.jail.bpf import OWN_PID, Action, Check, Conditional, Decision, assemble
from verifier_sandbox.jail.syscalls import SYSCALLS

# The launcher puts the binary at this descriptor, above RLIMIT_NOFILE: the one permitted
# execveat names it, and once exec has closed it the program can never create it again.
EXECUTABLE_FD = 63

_AT_EMPTY_PATH = 0x1000
_MAP_TYPE, _MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS = 0x0F, 0x01, 0x02, 0x20
_PROT_READ = 0x1
_CLONE_THREAD_FLAGS = 0x00010900  # CLONE_VM | CLONE_SIGHAND | CLONE_THREAD
_CLONE_VFORK = 0x00004000
_CLONE_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_TCGETS, _FIOCLEX, _FIONCLEX, _FIONBIO, _TIOCGWINSZ = 0x5401, 0x5451, 0x5450, 0x5421, 0x5413
_F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC = 1, 2, 3, 1030
_SIGKILL, _SIGSTOP, _RLIMIT_STACK, _AF_UNIX = 9, 19, 3, 1


@dataclass(frozen=True)
class Rule:
    """The same decision for some system calls, with its reason."""

    names: str
    why: str
    decision: Decision = Action.ALLOW


def _when(*alternatives: Sequence[Check], otherwise: Action = Action.EPERM) -> Conditional:
    return Conditional(tuple(tuple(checks) for checks in alternatives), otherwise=otherwise)


def _argument_in(index: int, *values: int) -> Conditional:
    return _when(*[[Check(index, value)] for value in values])


# CLONE_VFORK suspends the caller as if it waited for a disk: it would never count as idle.
_CLONE_CHECKED = _CLONE_THREAD_FLAGS | _CLONE_VFORK | _CLONE_NAMESPACES
_ONLY_THREADS = _when([Check(0, _CLONE_THREAD_FLAGS, mask=_CLONE_CHECKED)])


def _own_signals(signal_argument: int) -> Conditional:
    """Signals to oneself, but a SIGKILL that we did not send must mean that the machine did it."""
    checks = [Check(0, OWN_PID)]
    checks += [Check(signal_argument, number, negate=True) for number in (_SIGKILL, _SIGSTOP)]
    return _when(checks)


_COMPUTE = (
    Rule("read readv pread64 write writev pwrite64 lseek", "standard input and output"),
    Rule("close dup dup2", "no more than RLIMIT_NOFILE of them"),
    Rule("fstat", "the size of the input; newfstatat could ask for any name, which we cannot see"),
    Rule("ioctl", "isatty(), asked by every C library", _argument_in(1, _TCGETS)),
    Rule("fcntl", "descriptor flags", _argument_in(1, _F_GETFD, _F_SETFD, _F_GETFL)),
    Rule("poll ppoll select pselect6 pause", "waiting; the idle limit bounds it"),
    Rule("nanosleep clock_nanosleep", "sleeping; the idle limit bounds it"),
    Rule("brk munmap mremap mprotect madvise", "the heap; RSS and RLIMIT_AS bound it"),
    Rule(
        "mmap",
        "private memory, or the pages of a file that is there already, as fast readers map their "
        "input; new shared pages would escape the accounting",
        _when(
            [Check(3, _MAP_PRIVATE, mask=_MAP_TYPE)],
            [Check(3, _MAP_SHARED, mask=_MAP_TYPE | _MAP_ANONYMOUS), Check(2, _PROT_READ)],
        ),
    ),
    Rule("clone", "threads of this process, never a new process", _ONLY_THREADS),
    Rule(
        "clone3", "its flags are in memory, out of sight: the C library falls back", Action.ENOSYS
    ),
    Rule("futex set_robust_list rseq sched_yield set_tid_address arch_prctl", "threads"),
    Rule("membarrier get_robust_list", "threads"),
    Rule("gettid getpid", "raise() and locks"),
    Rule("rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack", "own handlers"),
    Rule("tgkill", "abort() and raise()", _own_signals(signal_argument=2)),
    Rule("kill", "raise() by another name", _own_signals(signal_argument=1)),
    Rule("alarm setitimer getitimer", "programs that search until time is nearly up"),
    Rule("clock_gettime clock_getres gettimeofday time times getrusage", "clocks"),
    Rule("getrlimit sched_getaffinity getcpu sysinfo uname getrandom", "reading the machine"),
    Rule(
        "prlimit64",
        "reading limits; setting one's own stack up to the hard limit, as deep recursions do",
        _when([Check(2, 0, wide=True)], [Check(0, 0), Check(1, _RLIMIT_STACK)]),
    ),
    Rule("restart_syscall exit exit_group", "going on and ending"),
    Rule(
        "execveat",
        "the launcher's own exec of the binary",
        _when([Check(0, EXECUTABLE_FD), Check(4, _AT_EMPTY_PATH)]),
    ),
)

_READ_FILES = (
    Rule("openat open", "libraries and modules; Landlock decides which"),
    Rule("stat lstat newfstatat statx getdents64", "reading them"),
    Rule("getppid getuid geteuid getgid getegid", "libraries look at it; it tells nothing"),
    Rule("readlink readlinkat access faccessat faccessat2 getcwd", "path searches"),
    Rule("fadvise64 statfs fstatfs", "hints and sizes asked by file readers"),
)

_PYTHON = (
    Rule("pipe pipe2 dup3 umask", "io and threading helpers"),
    Rule("epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2", "asyncio's loop"),
    Rule("socketpair", "asyncio wakes its loop by one", _argument_in(0, _AF_UNIX)),
    Rule("sendto", "on that pair; to no address", _when([Check(4, 0, wide=True)])),
    Rule("recvfrom", "on that pair"),
    Rule(
        "fcntl",
        "descriptor flags and os.dup",
        _argument_in(1, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC),
    ),
    Rule(
        "ioctl",
        "isatty(), set_inheritable() and setblocking()",
        _argument_in(1, _TCGETS, _FIOCLEX, _FIONCLEX, _FIONBIO),
    ),
    Rule("ftruncate", "the standard output is a file"),
)

_COMPILER = (
    Rule("clone", "the driver starts cc1plus, as and ld", _when([Check(0, 0, _CLONE_NAMESPACES)])),
    Rule("fork vfork execve wait4 waitid", "the driver starts cc1plus, as and ld"),
    Rule("mmap", "the linker maps its output file, the compiler its header"),
    Rule("pipe pipe2 dup3 umask chdir fchdir", "pipes between the stages"),
    Rule("fcntl", "descriptor flags and locks in the job's directory"),
    Rule("ioctl", "terminal width for messages", _argument_in(1, _TCGETS, _TIOCGWINSZ)),
    Rule("unlink unlinkat rename renameat renameat2 mkdir rmdir", "temporary and output files"),
    Rule("chmod fchmod fchmodat ftruncate fallocate utimensat", "output files"),
    Rule("prlimit64 setrlimit", "the compiler raises its stack up to the hard limit"),
    Rule("getpgrp tgkill", "diagnostics and abort()"),
)

_ATTACK = Rule(
    "ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd bpf perf_event_open userfaultfd "
    "io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key setns unshare "
    "mount umount2 pivot_root chroot move_mount fsopen fsconfig fsmount fspick open_tree "
    "mount_setattr open_by_handle_at name_to_handle_at clock_adjtime kexec_file_load finit_module "
    "vhangup modify_ldt _sysctl acct settimeofday swapon swapoff reboot sethostname setdomainname "
    "iopl ioperm create_module init_module delete_module get_kernel_syms query_module quotactl "
    "nfsservctl",
    "no solution of a problem needs them, and exploits begin there",
    Action.KILL,
)


@dataclass(frozen=True)
class Policy:
    """A named set of rules; of two rules for one call the later one counts."""

    name: str
    rules: tuple[Rule, ...]

    def decisions(self) -> Mapping[int, Decision]:
        return {SYSCALLS[name]: rule.decision for rule in self.rules for name in rule.names.split()}

    def filter_bytes(self) -> bytes:
        """`struct sock_filter[]`, with `OWN_PID` where the program's pid belongs."""
        return assemble(self.decisions(), default=Action.EPERM)


CPP_STATIC = Policy("cpp-static", (*_COMPUTE, _ATTACK))
CPP_DYNAMIC = Policy("cpp-dynamic", (*_COMPUTE, *_READ_FILES, _ATTACK))
PYTHON = Policy("python", (*_COMPUTE, *_READ_FILES, *_PYTHON, _ATTACK))
COMPILER = Policy("compiler", (*_COMPUTE, *_READ_FILES, *_COMPILER, _ATTACK))
