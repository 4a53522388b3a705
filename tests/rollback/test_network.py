"""The handles of network faults: what they do not touch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import netspace
import pytest

from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.rollback.network_handles import QDISC_MARK, NftTable, Qdisc, QueueRule, mark_of


@netspace.NEEDS
@pytest.mark.parametrize("kind", sorted(netspace.KINDS))
def test_what_went_with_its_namespace_is_healed(kind: str, spawn: Any, tmp_path: Path) -> None:
    """When the process that kept the namespace is gone, there is nothing left to take back, and no error."""
    handle, change = netspace.case_of(kind, spawn, tmp_path)
    change()
    assert not handle.is_undone()
    os.kill(handle.pid, 9)  # type: ignore[attr-defined]
    os.waitid(os.P_PID, handle.pid, os.WEXITED | os.WNOWAIT)  # type: ignore[attr-defined]
    spawn("true")
    _reap(handle.pid)  # type: ignore[attr-defined]
    handle.undo()
    assert handle.is_undone()


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


@netspace.NEEDS
def test_a_table_of_somebody_else_stays(spawn: Any, tmp_path: Path) -> None:
    """Only the table that bears our mark is deleted."""
    handle, change = netspace.case_of("nft_table", spawn, tmp_path)
    assert isinstance(handle, NftTable)
    handle.namespace.run(["nft", "add", "table", "inet", "firewall"])
    change()
    handle.undo()
    assert "firewall" in handle.namespace.run(["nft", "list", "tables"])


@netspace.NEEDS
def test_a_qdisc_of_somebody_else_stays(spawn: Any, tmp_path: Path) -> None:
    """A root qdisc without our mark is the user's, and counts as restored."""
    handle, _change = netspace.case_of("qdisc", spawn, tmp_path)
    assert isinstance(handle, Qdisc)
    tbf = ["tbf", "rate", "1mbit", "burst", "3200", "latency", "50ms"]
    handle.namespace.run(["tc", "qdisc", "add", "dev", "lo", "root", "handle", "7:", *tbf])
    assert handle.is_undone()
    handle.undo()
    shown = handle.namespace.run(["tc", "qdisc", "show", "dev", "lo"])
    assert "7:" in shown
    assert QDISC_MARK not in shown


@netspace.NEEDS
@pytest.mark.parametrize("kind", sorted(netspace.KINDS.keys() - {"names"}))
def test_the_machines_own_network_is_never_touched(kind: str, spawn: Any, tmp_path: Path) -> None:
    """A handle that names a process outside any namespace of ours is refused, whatever else it says."""
    handle, _change = netspace.case_of(kind, spawn, tmp_path)
    stranger = spawn()
    wrong = dataclasses.replace(handle, **dataclasses.asdict(NetworkNamespace.of(stranger.pid)))  # type: ignore[type-var]
    with pytest.raises(PermissionError, match="this machine's own network"):
        wrong.undo()
    with pytest.raises(PermissionError, match="this machine's own network"):
        wrong.is_undone()


@pytest.mark.parametrize("name", ["filter", "torchaos", "torchaos_a; flush", ""])
def test_what_does_not_bear_our_mark_is_refused(name: str) -> None:
    """A table or chain that can't be ours is not even a handle."""
    with pytest.raises(ValueError, match="the mark of torchaos"):
        NftTable(2, 1, "inet", name)
    with pytest.raises(ValueError, match="the mark of torchaos"):
        QueueRule(2, 1, name)


def test_marks_of_faults_differ() -> None:
    """Names that end alike, or hold what a tool would not take, get marks of their own, short enough for a chain."""
    faults = ["a-very-long-name-1", "another-very-long-name-1", "ümläut", "x" * 80, "network.partition"]
    marks = {mark_of(fault) for fault in faults}
    assert len(marks) == len(faults)
    assert all(len(mark) <= 28 and QueueRule(2, 1, mark) for mark in marks)
