"""Memory cgroups: made where the machine allows, never left behind."""

import pytest

from verifier_sandbox.jail import cgroup
from verifier_sandbox.jail.cgroup import SlotCgroup


@pytest.fixture
def fake_cgroups(tmp_path, monkeypatch):
    """A version 1 hierarchy made of plain files."""
    monkeypatch.setattr(cgroup, "_parents", lambda: [(tmp_path, "memory.limit_in_bytes")])
    monkeypatch.setattr(cgroup, "_REMOVE_PATIENCE_S", 0.05)
    return tmp_path


def test_a_group_limits_and_takes_processes(fake_cgroups):
    group = SlotCgroup.create("0")
    (path,) = fake_cgroups.iterdir()
    group.add(1234)
    assert (path / "memory.limit_in_bytes").read_text() == str(2 << 30)
    assert (path / "cgroup.procs").read_text() == "1234"


def test_groups_of_dead_services_are_removed(fake_cgroups):
    beyond_pid_max = 1 << 23
    stale = fake_cgroups / f"verifier-slot-{beyond_pid_max}-0"
    stale.mkdir()
    SlotCgroup.create("0")
    assert not stale.exists()


def test_without_a_writable_hierarchy_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "_parents", lambda: [(tmp_path / "missing", "memory.max")])
    assert SlotCgroup.create("0") is None


@pytest.mark.sandbox
def test_probing_leaves_no_group_behind():
    cgroup.is_available()
    left = [path for parent, _ in cgroup._parents() for path in parent.glob("*-probe")]
    assert left == []
