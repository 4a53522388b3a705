"""The undo of everything that a launcher makes is on disk before it is made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from torchaos.harness.host.native_libraries import ENV_CONTROL
from torchaos.harness.interfaces import ChaosError, Handle, JobSpec, Launcher, Node
from torchaos.harness.protocol.wire import ENV_NODE, ENV_RUN_ID
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.file_handles import File
from torchaos.harness.rollback.reaper_client import ReaperClient, UndoError
from torchaos.harness.running.launchers.job import spec_of_node
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.local_job import LocalJob


class MakesAFile(Launcher):
    """A launcher whose nodes need a file; it looks at what the undo log says when it makes it."""

    name: ClassVar[str] = "makes-a-file"

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.made = run_dir, run_dir / "job" / "made"
        self.guarded: list[str] = []

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return [File.of(self.made, self.made.parent, self.run_dir / "undo", made=_EMPTY)]

    def create(self, spec: JobSpec) -> Sequence[Node]:
        self.guarded = [record.id for record in undo_log.read(self.run_dir)[0] if record.open]
        self.made.touch()
        return (LocalNode(),)


_EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in ("undo", "job", "events"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path


def _spec(run_dir: Path) -> JobSpec:
    return JobSpec((sys.executable, "-c", ""), run_dir, {ENV_RUN_ID: "resources"}, run_dir / "log", 0)


def test_guarded_before_it_is_made(run_dir: Path) -> None:
    """When `create` is called the undo record is on disk, and healing takes away what it made."""
    launcher, journal = MakesAFile(run_dir), Journal(run_dir / "events")
    with ReaperClient.start(run_dir, "resources") as reaper:

        def record_undo(resources: Sequence[Handle], submission: int) -> None:
            reaper.record_undo(f"launcher#{submission}", resources, owner="launcher")

        job = LocalJob(lambda _: _spec(run_dir), launcher, journal, record_undo=record_undo)
        job.start()
        assert job.wait(300) == 0
        job.stop()
        assert launcher.guarded == ["launcher#0"]
        assert launcher.made.exists()
        assert all(each.verified for each in reaper.undo("launcher"))
    journal.close()
    assert not launcher.made.exists()


@pytest.mark.parametrize("guarded", [True, False])
def test_nothing_is_made_that_is_not_guarded(run_dir: Path, guarded: bool) -> None:
    """Where the way back can't be put on disk, or there is nobody to ask, the job does not start."""

    def refuse(resources: Sequence[Handle], submission: int) -> None:
        raise UndoError("the disk is full")

    launcher, journal = MakesAFile(run_dir), Journal(run_dir / "events")
    job = LocalJob(lambda _: _spec(run_dir), launcher, journal, record_undo=refuse if guarded else None)
    with pytest.raises(ChaosError, match="disk is full" if guarded else "undo is not on disk"):
        job.start()
    job.stop()
    journal.close()
    assert not launcher.made.exists()


def test_each_node_has_its_own_orders_for_nvml(tmp_path: Path) -> None:
    """A node that a launcher makes, and a node that is another machine, whose agent knows its number: GPUs are numbered
    from 0 on each."""
    env = {ENV_RUN_ID: "orders", ENV_CONTROL: str(tmp_path)}
    spec = JobSpec(("true",), tmp_path, {**env, ENV_NODE: "1"}, tmp_path / "log", 0)
    assert spec_of_node(LocalNode(1), spec, 0).env[ENV_CONTROL] == str(tmp_path / "node1")
    made = spec_of_node(LocalNode(0, {ENV_NODE: "0"}), replace(spec, env=env), 0)
    assert made.env[ENV_CONTROL] == str(tmp_path / "node0")
    assert spec_of_node(LocalNode(), replace(spec, env=env), 0).env[ENV_CONTROL] == str(tmp_path)
