"""launcher: ssh asks each machine before it starts anything; tests/clusters has a real sshd."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.running.launchers.ssh import Ssh

_SSH = """#!/bin/sh
case "$*" in
*" down "*) echo 'ssh: connect to host down port 22: Connection refused' >&2; exit 255 ;;
*" bare "*) exit 1 ;;
esac
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ssh: the machine `down` does not answer, and `bare` has no folder of the job."""
    (tmp_path / "ssh").write_text(_SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("host", "problem"),
    [("down", "ssh: connect to host down port 22: Connection refused"), ("bare", "it has no folder /job")],
)
def test_a_machine_that_can_not_be_a_node(host: str, problem: str) -> None:
    """The job is started on no machine, so nothing is left on the others."""
    spec = SimpleNamespace(nodes=2, cwd=Path("/job"))
    assert [node.host for node in Ssh(["b", "a"]).create(spec)] == ["a", "b"]  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=re.escape(f"{host} can't be a node: {problem}")):
        Ssh(["a", host]).create(spec)  # type: ignore[arg-type]
