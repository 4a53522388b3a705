"""The life of a fault, and of the run around it: each firing is guarded, applied and taken back; no error is lost."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.agent.wire import ControlPage, Event, Kind, Moment, State, start_ticks
from torchaos.harness.cli.run import Planned, _apart
from torchaos.harness.contracts import ChaosError, Need, RankProcess, Target, UsageError
from torchaos.harness.engine.arming import Slots
from torchaos.harness.engine.faults import FaultLife, Field
from torchaos.harness.engine.run import Run
from torchaos.harness.engine.site import NodeSite, Victim
from torchaos.harness.journal import Journal
from torchaos.harness.plan import After, Plan, PlannedFault, PlannedJob
from torchaos.harness.planner import make_plan
from torchaos.harness.rundir import RunDir
from torchaos.harness.scenario import load
from torchaos.harness.undo.handles import from_json, to_json
from torchaos.harness.undo.healer import Healed

LIMIT_S = 20.0


class InProcessReaper:
    """Guards and heals as the reaper does, without a process."""

    def __init__(self) -> None:
        self._guarded: dict[str, list[Any]] = {}

    def guard(self, record: str, handles: Any, owner: str, limit_s: float) -> None:
        self._guarded.setdefault(owner, []).extend(handles if isinstance(handles, list) else ())

    def mark(self, record: str, state: str) -> None: ...

    def heal(self, owner: str) -> list[Healed]:
        raw = [to_json(handle) for handle in self._guarded.pop(owner, [])]
        for handle in raw:
            from_json(handle).restore()
        return [Healed(owner, handle, from_json(handle).restored()) for handle in raw]


class OneRank:
    """A job of one rank, which is a process that sleeps."""

    def __init__(self, pid: int) -> None:
        ticks = start_ticks(pid)
        assert ticks is not None
        self.rank = RankProcess(0, 0, 0, pid, ticks, 0, 1)

    def ranks(self) -> dict[int, RankProcess]:
        return {0: self.rank}


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


@pytest.fixture
def journal(folder: RunDir) -> Iterator[Journal]:
    found = Journal(folder.events)
    yield found
    found.close()


def wait_until(holds: Callable[[], bool], state: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, f"timed out; last seen: {state()}"
        time.sleep(0.001)


def be_held(page: ControlPage, times: int) -> None:
    """What the agent does at a Moment of a fault from outside."""
    words = range(8)
    for number in range(1, times + 1):
        wait_until(lambda n=number: page.read(page.ALLOWED) >= n, lambda: [page.read(word) for word in words])  # type: ignore[misc]
        page.write(page.STATE, State.HELD)
        wait_until(lambda n=number: page.read(page.GO) >= n, lambda: [page.read(word) for word in words])  # type: ignore[misc]
        page.write(page.FIRED, number)
        page.write(page.STATE, State.RELEASED)


def lives(fault: PlannedFault, folder: RunDir, journal: Journal, pid: int) -> tuple[FaultLife, Slots]:
    slots = Slots.make(fault, folder)
    on = Field(journal, OneRank(pid), InProcessReaper(), 60.0)  # type: ignore[arg-type]
    on.steady.set()
    return FaultLife(fault, slots, on), slots


def kinds(journal: Journal, kind: Kind) -> list[Event]:
    return [event for event in journal.snapshot() if event.kind is kind]


def test_each_of_several_firings_is_applied_and_taken_back(folder: RunDir, journal: Journal, sleeper: int) -> None:
    """Taking the first one back lets go of every hold there is; the second must be held all the same."""
    fault = PlannedFault(
        "freeze", "process.freeze", "node", Target((0,)), Moment(0, 3, None), {}, "", "", duration_s=0.01, times=2
    )
    life, slots = lives(fault, folder, journal, sleeper)
    agent = threading.Thread(target=be_held, args=(slots.pages[0], 2), daemon=True)
    agent.start()
    life.start()
    assert life.join(LIMIT_S), journal.snapshot()
    agent.join(LIMIT_S)
    assert len(kinds(journal, Kind.APPLYING)) == 2
    assert [event.data["verified"] for event in kinds(journal, Kind.ROLLED_BACK)] == [True, True]


def test_whatever_an_injector_raises_is_told(
    folder: RunDir, journal: Journal, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in somebody's injector is a fault that was missed, with its name, and no lost thread."""
    from torchaos.injectors.process_freeze import Freeze

    def fail(self: object, site: object) -> None:
        raise LookupError("no such device")

    monkeypatch.setattr(Freeze, "apply", fail)
    fault = PlannedFault("freeze", "process.freeze", "node", Target((0,)), After(0.0), {}, "", "")
    life, _slots = lives(fault, folder, journal, sleeper)
    journal.emit(Kind.JOB_STARTED, {"submission": 0, "pid": 1})
    life.start()
    assert life.join(LIMIT_S)
    assert [event.data["reason"] for event in kinds(journal, Kind.MISSED)] == ["LookupError: no such device"]


def test_nobody_is_waited_for_beyond_the_end_of_the_run(sleeper: int) -> None:
    """A grace period ends with the run: what is done to the target later would be done to a run that is over."""
    ended = threading.Event()
    ticks = start_ticks(sleeper)
    assert ticks is not None
    site = NodeSite("go", [Victim(sleeper, ticks, 0)], lambda *_: None, run_ended=ended)  # type: ignore[arg-type]
    ended.set()
    with pytest.raises(ChaosError, match="the run ended"):
        site.wait_for_exit(600.0)


def test_a_closed_journal_takes_nothing_more(folder: RunDir) -> None:
    """Its file descriptor may be another file's by then."""
    journal = Journal(folder.events)
    journal.close()
    with pytest.raises(ChaosError, match="the run is over"):
        journal.emit(Kind.NOTE, {"text": "late"})


def test_a_job_that_cannot_be_started_is_one_clear_error(tmp_path: Path) -> None:
    """The kernel does not know the program's format: bad usage, with all stages done, though no fault ever lived."""
    program = tmp_path / "torchrun"
    program.write_text("neither a script nor a binary")
    program.chmod(0o755)
    job = PlannedJob((str(program),), str(tmp_path), {}, 2, 1, 60.0)
    fault = PlannedFault("kill", "process.kill", "rank", Target((1,)), Moment(1, 5, None), {}, "", "Kill")
    folder = RunDir(tmp_path / "run").create()
    with pytest.raises(UsageError, match="can't be started"):
        Run(Plan("x", "", 0, job, (fault,), ()), folder)()
    lines = (folder.events / "harness.jsonl").read_text().splitlines()
    stages = [event["data"]["stage"] for event in map(json.loads, lines) if event["kind"] == "run.stage"]
    assert stages == ["prepare", "launch", "collect", "heal", "stop job", "end"]


def test_no_stage_of_the_clean_up_keeps_the_next_from_coming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while evidence is collected is told, and the job is ended all the same."""
    ended = tmp_path / "ended"
    job = PlannedJob(("/bin/sh", "-c", f"echo $$ > {ended}; exec sleep 600"), str(tmp_path), {}, 1, 1, 60.0)
    run = Run(Plan("x", "", 0, job, (), ()), RunDir(tmp_path / "run").create())

    def fail() -> None:
        raise LookupError("no version")

    monkeypatch.setattr(run, "_collect", fail)
    monkeypatch.setattr(run, "_watch", lambda: wait_until(lambda: ended.is_file() and ended.read_text() != "", str))
    with pytest.raises(LookupError):
        run()
    assert start_ticks(int(ended.read_text())) is None


def test_several_landings_of_a_trigger_from_outside_are_refused(tmp_path: Path) -> None:
    """It would come once, and the scenario says twice."""
    file = tmp_path / "scenario.yaml"
    file.write_text(
        "scenario: twice\njob: {command: torchrun --nproc-per-node 2 train.py}\nassert: [completed]\n"
        "faults:\n  - {inject: process.freeze, target: {rank: 1}, when: {time: 1s}, for: 1s, times: 2}\n"
    )
    with pytest.raises(UsageError, match="several faults"):
        make_plan(load(file, ()), file, 0)


def test_one_scenario_given_twice_has_two_folders(tmp_path: Path) -> None:
    """Two files with one name and seed in one call: the second must not find the folder of the first."""
    one = Planned(
        Plan("x", "", 0, PlannedJob(("a",), "/", {}, 1, 1, 1.0), (), ()), RunDir(tmp_path / "x"), tmp_path, ()
    )
    assert [each.folder.root.name for each in _apart([one, one, one])] == ["x", "x-2", "x-3"]


def test_checkpoints_are_known_by_their_saves(tmp_path: Path) -> None:
    """The inventory names the folder as the job's own events do, so that a checkpoint finds the save that made it."""
    folder = RunDir(tmp_path / "run").create()
    root = folder.job / "checkpoints"
    job = PlannedJob(("/bin/true",), str(tmp_path), {}, 1, 1, 60.0, "{run}/checkpoints")
    Run(Plan("x", "", 0, job, (), (), collect=(Need.INVENTORY,)), folder)()
    found = json.loads((folder.artifacts / "inventory.json").read_text())
    assert found["root"] == str(root)
