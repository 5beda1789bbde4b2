"""Filters decide as their rules say: the assembled program, run by a small interpreter."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_sandbox.jail import policies
from verifier_sandbox.jail.bpf import Action, Check, Conditional, assemble, with_own_pid
from verifier_sandbox.jail.syscalls import SYSCALLS

X86_64, I386 = 0xC000003E, 0x40000003
PROT_READ, PROT_WRITE = 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_SHARED_VALIDATE, MAP_ANONYMOUS = 1, 2, 3, 0x20
POLICIES = [policies.CPP_STATIC, policies.CPP_DYNAMIC, policies.PYTHON, policies.COMPILER]


def run(program: bytes, number: int, arguments=(), arch: int = X86_64) -> int:
    """Interprets the classic BPF that seccomp accepts, as the kernel does."""
    words = list(arguments) + [0] * (6 - len(arguments))
    data = struct.pack("<IIQ6Q", number, arch, 0, *words)
    code = list(struct.iter_unpack("<HBBI", program))
    at, accumulator = 0, 0
    for _ in range(len(code)):
        operation, if_true, if_false, k = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == 0x54:
            accumulator &= k
        elif operation == 0x06:
            return k
        elif operation == 0x05:
            at += k
        elif operation == 0x15:
            at += if_true if accumulator == k else if_false
        elif operation == 0x35:
            at += if_true if accumulator >= k else if_false
        else:
            raise AssertionError(f"seccomp has no operation {operation:#x}")
    raise AssertionError("the program does not return")


ACTIONS = st.sampled_from(list(Action))
CHECKS = st.builds(
    Check,
    index=st.integers(0, 5),
    value=st.integers(0, 3),
    mask=st.sampled_from([0xFFFFFFFF, 3]),
    negate=st.booleans(),
)
CONDITIONALS = st.builds(
    Conditional,
    alternatives=st.lists(st.lists(CHECKS, min_size=1, max_size=3).map(tuple), min_size=1).map(
        tuple
    ),
    action=ACTIONS,
    otherwise=ACTIONS,
)


def meaning(decision, arguments) -> Action:
    if isinstance(decision, Action):
        return decision
    for checks in decision.alternatives:
        if all(((arguments[c.index] & c.mask) == c.value) != c.negate for c in checks):
            return decision.action
    return decision.otherwise


@settings(max_examples=60, deadline=None)
@given(
    decisions=st.dictionaries(st.integers(0, 460), ACTIONS | CONDITIONALS, max_size=60),
    default=ACTIONS,
    number=st.integers(0, 470),
    arguments=st.lists(st.integers(0, 7), min_size=6, max_size=6),
)
def test_assembled_filter_means_what_its_table_says(decisions, default, number, arguments):
    wanted = meaning(decisions.get(number, default), arguments)
    assert run(assemble(decisions, default), number, arguments) == wanted


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_foreign_architectures_and_numberings_are_killed(policy):
    program = policy.filter_bytes()
    assert run(program, SYSCALLS["read"], arch=I386) == Action.KILL
    assert run(program, 0x40000000 | SYSCALLS["read"]) == Action.KILL


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_rule_has_a_reason_and_names_real_calls(policy):
    for rule in policy.rules:
        assert rule.why
        assert set(rule.names.split()) <= SYSCALLS.keys()


@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda policy: policy.name)
def test_submissions_make_no_process_socket_or_file(policy):
    program = policy.filter_bytes()
    for name in [
        "fork",
        "vfork",
        "execve",
        "socket",
        "connect",
        "bind",
        "creat",
        "unlink",
        "mkdir",
        "symlink",
        "shmget",
    ]:
        assert run(program, SYSCALLS[name]) == Action.EPERM, name
    signal_child = 17
    assert run(program, SYSCALLS["clone"], [signal_child]) == Action.EPERM
    assert run(program, SYSCALLS["clone3"]) == Action.ENOSYS


def test_static_programs_cannot_open_anything():
    program = policies.CPP_STATIC.filter_bytes()
    for name in [
        "open",
        "openat",
        "openat2",
        "stat",
        "newfstatat",
        "access",
        "readlink",
        "getdents64",
    ]:
        assert run(program, SYSCALLS[name]) == Action.EPERM, name


@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda policy: policy.name)
@pytest.mark.parametrize(
    ("protection", "flags", "action"),
    [
        (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, Action.ALLOW),
        (PROT_READ, MAP_PRIVATE, Action.ALLOW),
        (PROT_READ, MAP_SHARED, Action.ALLOW),
        (PROT_READ | PROT_WRITE, MAP_SHARED, Action.EPERM),
        (PROT_READ, MAP_SHARED | MAP_ANONYMOUS, Action.EPERM),
        (PROT_READ, MAP_SHARED_VALIDATE, Action.EPERM),
    ],
)
def test_shared_mappings_are_of_files_and_for_reading(policy, protection, flags, action):
    arguments = [0, 4096, protection, flags]
    assert run(policy.filter_bytes(), SYSCALLS["mmap"], arguments) == action


def test_a_descriptor_may_be_asked_about_but_no_name():
    program = policies.CPP_STATIC.filter_bytes()
    at_empty_path = 0x1000
    assert run(program, SYSCALLS["fstat"], [0]) == Action.ALLOW
    assert run(program, SYSCALLS["newfstatat"], [0, 1, 1, at_empty_path]) == Action.EPERM
    assert run(program, SYSCALLS["statx"], [0, 1, at_empty_path]) == Action.EPERM


@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda policy: policy.name)
def test_threads_are_made_but_nobody_is_suspended_for_one(policy):
    program = policy.filter_bytes()
    of_the_c_library, clone_vfork, new_user = 0x3D0F00, 0x4000, 0x10000000
    assert run(program, SYSCALLS["clone"], [of_the_c_library]) == Action.ALLOW
    for more in (clone_vfork, new_user):
        assert run(program, SYSCALLS["clone"], [of_the_c_library | more]) == Action.EPERM


def test_a_wide_check_sees_all_64_bits():
    table = {1: Conditional(((Check(0, 0, wide=True),),))}
    program = assemble(table, Action.EPERM)
    assert run(program, 1, [0]) == Action.ALLOW
    assert run(program, 1, [1 << 32]) == Action.EPERM


def test_signals_go_to_oneself_alone_and_never_kill():
    program = with_own_pid(policies.CPP_STATIC.filter_bytes(), 4321)
    assert run(program, SYSCALLS["tgkill"], [4321, 4321, 6]) == Action.ALLOW
    assert run(program, SYSCALLS["tgkill"], [4321, 4321, 9]) == Action.EPERM
    assert run(program, SYSCALLS["tgkill"], [1, 1, 6]) == Action.EPERM
