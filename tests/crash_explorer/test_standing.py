"""A resume that stands for other states: its files and events are put on them. No job runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from explorations import outcome_of
from resumes import ENOUGH, Trainer, recorded, resumed

from torchaos.harness.crash_explorer import synthetic_crash
from torchaos.harness.crash_explorer.folder_contents import Blobs
from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.fuse_mount import ReadSet
from torchaos.harness.crash_explorer.recording_log import Query
from torchaos.harness.crash_explorer.resume_chain import ResumeCache, ReusedResumes
from torchaos.harness.crash_explorer.resume_outcomes import OutcomeClass
from torchaos.harness.crash_explorer.resume_runs import Resume, ResumeRuns, checkpoints_in
from torchaos.harness.record.rundir import RunDir

LOOKS = ReadSet(frozenset({(Query.KIND, "last.pt"), (Query.NAMES, "old")}))


class OnDisk(ResumeRuns):
    """Trials whose states have files on disk, and no job. `died`: the step of the death by the name of the state."""

    def __init__(self, folder: Path, died: Mapping[str, int] | None = None) -> None:
        plan = recorded().plan
        self.now, self.recorded, self.died = RunDir(folder / "now"), recorded(), died or {}
        self.plan = replace(plan, job=replace(plan.job, checkpoints="{run}/saved"))
        self.taken = 0  # inventories
        self._manifests: Mapping[Path, tuple[float, float | None]] = {}
        self.recording: Any = type("Recording", (), {"lines": {}, "stored": False})
        self.record = self.recorded

    def death(self, state: State) -> tuple[float, dict[int, float]]:
        return self.recorded.events[-1].mono_s, {}

    def died_at(self, state: State) -> int:
        return self.died.get(state.name, 7)

    def take_inventory(self) -> None:
        self.taken += 1
        (self.now.artifacts / "inventory.json").write_text(json.dumps({"problem": None, **self.files}))

    def judge(self, state: State, hung: bool, seconds: float, warm: bool = False) -> Resume:
        return Resume(replace(outcome_of(state), warm=warm, from_step=5), self.record)

    @property
    def files(self) -> dict[str, str]:
        root = checkpoints_in(self.plan, self.now)
        return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}


def _state(folder: Path, name: str, **files: str) -> State:
    source = folder / name
    for path, text in {
        "old/part": "p",
        "rng": "r",
        **{key.replace("_", "."): text for key, text in files.items()},
    }.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    blobs = Blobs(folder / f"blobs-{name}")
    tree = blobs.take(source)
    return State(name, "process death", None, tree, None, 1, blobs)


def _resume(runs: OnDisk) -> None:
    """What a resume does: it saves anew, removes a file and makes a folder; and the agent writes its events."""
    root = checkpoints_in(runs.plan, runs.now)
    (root / "saving").write_text("saved")
    (root / "saving").replace(root / "last.pt")
    (root / "rng").unlink()
    (root / "new").mkdir()
    (root / "new" / "part").write_text("n")
    (runs.now.events / "rank0.jsonl").write_text("{}\n")


@pytest.fixture
def taken(tmp_path: Path) -> tuple[ResumeCache, OnDisk]:
    """One resume is known: from the state `one`, which died at step 7."""
    runs = OnDisk(tmp_path, {"late": 9})
    standing = ResumeCache(runs, tmp_path / "standing")
    one = _state(tmp_path, "one", last_pt="torn")
    runs.stage(one)
    _resume(runs)
    standing.learn(one, LOOKS, replace(outcome_of(one), died_at_step=7, from_step=5), ended=False)
    return standing, runs


def test_what_a_resume_left_is_put_on_another_state(taken: tuple[ResumeCache, OnDisk], tmp_path: Path) -> None:
    """What the resume wrote, made and removed is the same on the other state; files that it never touched stay as the
    other death left them, and do not look newer than the resume. Its events follow those of the other death."""
    standing, runs = taken
    root, staged_s = checkpoints_in(runs.plan, runs.now), runs.staged_s
    found = standing.of(_state(tmp_path, "two", last_pt="another torn file", extra="e"))
    assert found
    assert (found.outcome.like, found.outcome.state, found.outcome.warm) == ("one", "two", True)
    assert runs.files == {"old/part": "p", "last.pt": "saved", "new/part": "n", "extra": "e"}
    assert (root / "extra").stat().st_mtime <= staged_s[1]
    assert {path.name for path in runs.now.events.iterdir()} == {synthetic_crash.FILE, "rank0.jsonl"}
    assert runs.staged_s[0] == staged_s[0]


def test_checkpoints_that_were_read_before(taken: tuple[ResumeCache, OnDisk], tmp_path: Path) -> None:
    """States that differ only in files that the resume has written anew or removed are equal after it, so their
    checkpoints are read once. A file that the resume did not touch makes a difference."""
    standing, runs = taken
    cases = [
        ("a", 1, {"last_pt": "torn here"}), ("b", 1, {"last_pt": "and here", "rng": "other"}),
        ("c", 2, {"last_pt": "torn", "more": "m"}), ("d", 3, {"last_pt": "torn", "more": "M"}),
        ("e", 3, {"last_pt": "", "more": "m"}),
    ]  # fmt: skip
    for name, read, files in cases:
        assert standing.of(_state(tmp_path, name, **files))
        assert runs.taken == read, name
        assert json.loads((runs.now.artifacts / "inventory.json").read_text()) == {"problem": None, **runs.files}


def test_checkpoints_that_were_not_read_to_the_end(
    taken: tuple[ResumeCache, OnDisk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of checkpoints with a problem, such as no time to read them all, is no answer for another state."""
    standing, runs = taken
    reads = []

    def read() -> None:
        reads.append(1)
        (runs.now.artifacts / "inventory.json").write_text(json.dumps({"problem": "not read within 300 s"}))

    monkeypatch.setattr(runs, "take_inventory", read)
    for name in ("a", "b"):
        assert standing.of(_state(tmp_path, name, last_pt=f"torn in {name}"))
    assert len(reads) == 2


def test_a_state_that_the_job_can_tell_apart_is_resumed(taken: tuple[ResumeCache, OnDisk], tmp_path: Path) -> None:
    """Another answer to a question, or a later death than the one that the resume was long enough for."""
    standing, _runs = taken
    assert standing.of(_state(tmp_path, "without")) is None
    assert standing.of(_state(tmp_path, "listed", last_pt="torn", **{"old/more": "m"})) is None
    assert standing.of(_state(tmp_path, "late", last_pt="torn")) is None
    assert standing.of(_state(tmp_path, "early", last_pt="torn"))


@pytest.mark.parametrize("same", [True, False])
def test_the_first_state_is_resumed_all_the_same(tmp_path: Path, same: bool) -> None:
    """A job that does something else each time is found: no resume stands for another state from then on. If the check
    gives the same, it is made once."""
    run = resumed(tmp_path / "one-run", 12, Trainer(kills=[(13, 0)]), [ENOUGH])
    other = resumed(tmp_path / "other-run", 12, Trainer(kills=[(13, 0)], broken=frozenset({"rng"})), [ENOUGH])
    runs, checked = OnDisk(tmp_path), []
    runs.record = run
    spared = ReusedResumes(runs, tmp_path / "home", [])
    (tmp_path / "home").mkdir()
    one = _state(tmp_path, "one", last_pt="torn")
    runs.stage(one)
    _resume(runs)
    spared.learn(one, Resume(replace(outcome_of(one), died_at_step=7, from_step=5), run, LOOKS))

    def resume(state: State) -> Resume:
        checked.append(state.name)
        return Resume(replace(outcome_of(state), kind=OutcomeClass.RIGHT, warm=True), run if same else other)

    found = [spared.of(_state(tmp_path, name, last_pt=name), {}, resume) for name in ("two", "three")]
    assert checked == ["two"]
    assert [bool(one and one.like) for one in found] == [same, same]
    assert ("in step 11 of rank 0" in spared.doubt) is not same
    spared.close()
    assert not (tmp_path / "home" / "standing").exists()
