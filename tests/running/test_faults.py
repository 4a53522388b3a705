"""The life of a fault, and of the run around it: each firing is guarded, applied and undone; no error is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.cli.run import Interrupt, Planned, _apart, signals
from torchaos.harness.fault_drivers.site import OutsideSite, Victim
from torchaos.harness.host.processes import stat
from torchaos.harness.interfaces import ChaosError, Need, RankProcess, Target, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.control_pages import ControlPage, State
from torchaos.harness.protocol.wire import Event, Kind, start_ticks
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import After, Plan, PlannedFault, PlannedJob
from torchaos.harness.record.result import ExitCode
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.registry import find
from torchaos.harness.release.repeats import Ask
from torchaos.harness.rollback.file_handles import File
from torchaos.harness.rollback.handles import Process, from_json, to_json
from torchaos.harness.rollback.orphaned_runs import LeftBehind
from torchaos.harness.rollback.reaper import UndoResult
from torchaos.harness.rollback.reaper_client import UndoError
from torchaos.harness.running.engine.fault_lifecycle import FaultContext, FaultLife, FaultPages, victims_of
from torchaos.harness.running.engine.stages import Run
from torchaos.harness.running.fault_checks import NotPermitted
from torchaos.harness.running.planner import make_plan
from torchaos.harness.running.scenario_run import ScenarioRun
from torchaos.harness.scenario.loader import load

LIMIT_S = 120.0


class InProcessReaper:
    """Guards and heals as the reaper does, without a process."""

    def __init__(self) -> None:
        self._guarded: dict[str, list[Any]] = {}
        self.lost, self.dies_at = False, ""

    def record_undo(self, record: str, handles: Any, owner: str, limit_s: float) -> None:
        self._guarded.setdefault(owner, []).extend(handles if isinstance(handles, list) else ())

    def mark(self, record: str, state: str, limit_s: float | None = None) -> None:
        self.lost = self.lost or state == self.dies_at
        self.check()

    def check(self) -> None:
        if self.lost:
            raise UndoError("the reaper is gone")

    def undo(self, owner: str) -> list[UndoResult]:
        raw = [to_json(handle) for handle in self._guarded.pop(owner, [])]
        for handle in raw:
            from_json(handle).undo()
        return [UndoResult(owner, handle, from_json(handle).is_undone()) for handle in raw]


def process_of(pid: int, rank: int = 0) -> RankProcess:
    ticks = start_ticks(pid)
    assert ticks is not None
    return RankProcess(rank, rank, 0, pid, ticks, 0, 1)


class OneRank:
    """A job of one rank, which is a process that sleeps."""

    def __init__(self, pid: int) -> None:
        self.rank = process_of(pid)

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


def be_held(page: ControlPage, times: int) -> None:
    """What the agent does at a Moment of a fault from outside."""
    words = range(8)
    for number in range(1, times + 1):
        wait_until(lambda n=number: page.read(page.ALLOWED) >= n, state=lambda: [page.read(word) for word in words])  # type: ignore[misc]
        page.write(page.STATE, State.HELD)
        wait_until(lambda n=number: page.read(page.GO) >= n, state=lambda: [page.read(word) for word in words])  # type: ignore[misc]
        page.write(page.FIRED, number)
        page.write(page.STATE, State.RELEASED)


def lives(fault: PlannedFault, folder: RunDir, journal: Journal, pid: int) -> tuple[FaultLife, FaultPages]:
    fault_pages = FaultPages.make(fault, folder)
    on = FaultContext(journal, OneRank(pid), InProcessReaper(), 60.0)  # type: ignore[arg-type]
    on.steady.set()
    return FaultLife(fault, fault_pages, on), fault_pages


def kinds(journal: Journal, kind: Kind) -> list[Event]:
    return [event for event in journal.snapshot() if event.kind is kind]


def test_each_of_several_firings_is_applied_and_taken_back(folder: RunDir, journal: Journal, sleeper: int) -> None:
    """Taking the first one back lets go of every hold there is; the second must be held all the same."""
    fault = PlannedFault(
        "freeze", "process.freeze", "node", Target((0,)), Moment(0, 3, None), {}, "", "", duration_s=0.01, times=2
    )
    life, fault_pages = lives(fault, folder, journal, sleeper)
    agent = threading.Thread(target=be_held, args=(fault_pages.pages[0], 2), daemon=True)
    agent.start()
    life.start()
    assert life.join(LIMIT_S), journal.snapshot()
    agent.join(LIMIT_S)
    assert len(kinds(journal, Kind.APPLYING)) == 2
    assert [event.data["verified"] for event in kinds(journal, Kind.ROLLED_BACK)] == [True, True]


def test_a_target_that_was_replaced_is_guarded_anew(folder: RunDir, journal: Journal, sleeper: int) -> None:
    """Its way back was written down for the process before it: the one that is hit is the one that is set free."""

    class Two(OneRank):
        other: RankProcess

        def ranks(self) -> dict[int, RankProcess]:
            return {0: self.rank, 1: self.other}

    fault = PlannedFault(
        "freeze", "process.freeze", "node", Target((1,)), Moment(0, 3, None), {}, "", "", duration_s=0.01
    )
    with subprocess.Popen(["sleep", "600"]) as before, subprocess.Popen(["sleep", "600"]) as after:
        try:
            job = Two(sleeper)
            job.other = process_of(before.pid, 1)
            fault_pages = FaultPages.make(fault, folder)
            on = FaultContext(journal, job, InProcessReaper(), 60.0)  # type: ignore[arg-type]
            on.steady.set()
            life = FaultLife(fault, fault_pages, on)
            life.start()
            wait_until(lambda: bool(kinds(journal, Kind.ARMED)), state=journal.snapshot)
            job.other = process_of(after.pid, 1)
            be_held(fault_pages.pages[0], 1)
            assert life.join(LIMIT_S), journal.snapshot()
            assert [event.data["pid"] for event in kinds(journal, Kind.APPLYING)] == [after.pid]
            found = stat(after.pid)
            assert found is not None
            assert found.state != "T"
        finally:
            before.kill()
            after.kill()


@pytest.mark.parametrize(("node", "lands"), [(0, True), (1, False)])
def test_a_nodes_ranks_are_those_that_are_there(
    folder: RunDir, journal: Journal, sleeper: int, node: int, lands: bool
) -> None:
    """Planned for rank 5; rank 0 has its place by then. A node without a rank is not hit, and the reason says why."""
    fault = PlannedFault(
        "freeze", "process.freeze", "node", Target((5,), (node,)), After(0.0), {}, "", "", duration_s=0.01
    )
    journal.emit(Kind.JOB_STARTED, {"submission": 0, "pid": 1})
    life, _fault_pages = lives(fault, folder, journal, sleeper)
    life.start()
    assert life.join(LIMIT_S), journal.snapshot()
    assert [event.rank for event in kinds(journal, Kind.APPLYING)] == [0] * lands
    reasons = [event.data["reason"] for event in kinds(journal, Kind.MISSED)]
    assert reasons == ([] if lands else ["node 1 has no rank now"])


def test_a_node_without_ranks_is_known_by_its_first_process() -> None:
    """A standby has no rank: a fault of its GPU finds the node by the oldest process there, and other faults are
    missed."""
    processes = {12: 700, 9: 500}
    live = SimpleNamespace(node=SimpleNamespace(index=2), processes=lambda: processes)
    job: Any = SimpleNamespace(ranks=dict, nodes=lambda: [live])
    fault = PlannedFault("sick", "gpu.xid", "node", Target((), (2,)), After(0.0), {}, "", "")
    assert victims_of(fault, "ranks_or_node", job) == [Victim(9, 500, None)]
    with pytest.raises(ChaosError, match="node 2 has no rank now"):
        victims_of(fault, "ranks", job)
    processes.clear()
    with pytest.raises(ChaosError, match="node 2 has no rank now, and no process of the job"):
        victims_of(fault, "ranks_or_node", job)


def test_whatever_an_injector_raises_is_told(
    folder: RunDir, journal: Journal, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in somebody's injector is a fault that was missed, with its name, and no lost thread."""
    from torchaos.injectors.process_hang import Freeze

    def fail(self: object, site: object) -> None:
        raise LookupError("no such device")

    monkeypatch.setattr(Freeze, "apply", fail)
    fault = PlannedFault("freeze", "process.freeze", "node", Target((0,)), After(0.0), {}, "", "")
    life, _fault_pages = lives(fault, folder, journal, sleeper)
    journal.emit(Kind.JOB_STARTED, {"submission": 0, "pid": 1})
    life.start()
    assert life.join(LIMIT_S)
    assert [event.data["reason"] for event in kinds(journal, Kind.MISSED)] == ["LookupError: no such device"]


def test_a_fault_that_is_refused_lets_go_of_its_pacer(
    folder: RunDir, journal: Journal, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would change is not permitted: it is called off, so that no rank waits for it at its Moment."""
    from torchaos.injectors.process_hang import Freeze

    def refuse(self: object, site: object) -> None:
        raise NotPermitted("outside")

    find("injectors", Freeze.name)  # it is checked when it is loaded, before it is made to refuse
    monkeypatch.setattr(Freeze, "changes", refuse)
    fault = PlannedFault("freeze", "process.freeze", "node", Target((0,)), Moment(0, 3, None), {}, "", "")
    life, fault_pages = lives(fault, folder, journal, sleeper)
    life.start()
    assert life.join(LIMIT_S)
    page = fault_pages.pages[0]
    assert page.read(page.ARMED_PID) == page.CALLED_OFF
    assert page.read(page.GO) > 0
    assert [event.data["reason"] for event in kinds(journal, Kind.MISSED)] == ["outside"]


def test_nothing_is_injected_once_the_reaper_is_gone(folder: RunDir, journal: Journal, sleeper: int) -> None:
    """It died after the fault had been guarded and before its Moment: the rank goes on, and nothing happens to it."""
    fault = PlannedFault("freeze", "process.freeze", "node", Target((0,)), Moment(0, 3, None), {}, "", "")
    life, fault_pages = lives(fault, folder, journal, sleeper)
    page = fault_pages.pages[0]
    life.start()
    wait_until(lambda: page.read(page.ALLOWED) == 1, state=journal.snapshot)
    life._on.reaper.lost = True  # type: ignore[attr-defined]
    agent = threading.Thread(target=be_held, args=(page, 1), daemon=True)
    agent.start()
    assert life.join(LIMIT_S)
    agent.join(LIMIT_S)
    assert kinds(journal, Kind.APPLYING) == []
    assert [event.data["reason"] for event in kinds(journal, Kind.MISSED)] == ["the reaper is gone"]


def test_a_fault_is_taken_back_at_once_if_nobody_else_would(folder: RunDir, journal: Journal, sleeper: int) -> None:
    """The reaper dies right after the rank was stopped: the rank runs again at once, and not only at the end of the
    run, because the fault's thread takes the fault back before it ends."""
    fault = PlannedFault("freeze", "process.freeze", "node", Target((0,)), After(0.0), {}, "", "", duration_s=60.0)
    life, _ = lives(fault, folder, journal, sleeper)
    journal.emit(Kind.JOB_STARTED, {"submission": 0, "pid": 1})
    life._on.reaper.dies_at = "applied"  # type: ignore[attr-defined]
    life.start()
    assert life.join(LIMIT_S)
    assert [event.data["verified"] for event in kinds(journal, Kind.ROLLED_BACK)] == [True]
    assert Path(f"/proc/{sleeper}/stat").read_text().rpartition(")")[2].split()[0] != "T"
    assert [event.data["reason"] for event in kinds(journal, Kind.MISSED)] == ["the reaper is gone"]


def test_what_cannot_be_taken_back_is_exit_code_4_also_without_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run directory went, and with it what is needed to take something back: that is worse than no verdict."""
    job = PlannedJob(("/bin/sleep", "600"), str(tmp_path), {}, 1, 1, 60.0)
    folder, source = RunDir(tmp_path / "run"), tmp_path / "x.yaml"
    source.write_text("")
    scenario_run = ScenarioRun(Plan("x", "", 0, job, (), ()), folder, b"", [])

    def rot(run: Run) -> None:
        lost = File.of(source, tmp_path, folder.undo)
        run._reaper.record_undo("fault", [lost], owner="fault")
        source.write_text("damaged")
        shutil.rmtree(folder.root)

    monkeypatch.setattr(Run, "_watch", rot)
    with pytest.raises(LeftBehind, match="fault could not be undone"):
        scenario_run()


def test_a_twin_that_leaves_something_is_exit_code_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is not the run's, and yet no run may end as if nothing were left."""
    job = PlannedJob(("/bin/true",), str(tmp_path), {}, 1, 1, 60.0)
    scenario_run = ScenarioRun(Plan("x", "", 0, job, (), ()), RunDir(tmp_path / "run"), b"", [])
    scenario_run.left.append("job could not be undone: it sleeps in the kernel")
    assert scenario_run().exit_code is ExitCode.ROLLBACK


def test_a_fault_that_lands_late_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is over while a fault is still being applied: it is taken back once more before the reaper goes."""
    job = PlannedJob(("/bin/sleep", "600"), str(tmp_path), {}, 1, 1, 60.0)
    run = Run(Plan("x", "", 0, job, (), ()), RunDir(tmp_path / "run").create())
    sleep = subprocess.Popen(["sleep", "600"])
    taken_back = threading.Event()

    def stop() -> None:
        taken_back.wait(LIMIT_S)
        sleep.send_signal(signal.SIGSTOP)
        os.waitpid(sleep.pid, os.WUNTRACED)
        with suppress(UndoError):
            run._reaper.mark("late", "applied")

    late = PlannedFault("late", "process.freeze", "node", Target((0,)), After(0.0), {}, "", "")
    thread = threading.Thread(target=stop)

    class Applier:
        def undo(self, fault: str) -> list[str]:
            run._reaper.undo(fault)
            taken_back.set()
            return []

        def end(self, wait_s: float, hurried: Any = None) -> list[str]:
            if taken_back.is_set():
                thread.join(wait_s)
            return [late.id] if thread.is_alive() else []

    def watch() -> None:
        run._reaper.record_undo("late", [Process.of(sleep.pid, "resume")], owner="late")
        run._reaper.mark("late", "maybe_applied")
        run._appliers.append((Applier(), late))  # type: ignore[arg-type]
        thread.start()

    monkeypatch.setattr(run, "_watch", watch)
    try:
        run()
        assert (found := stat(sleep.pid))
        assert found.state != "T"
        assert run.left == []
    finally:
        sleep.kill()
        sleep.wait()


def test_a_signal_between_two_runs_ends_the_next(tmp_path: Path) -> None:
    """It comes when one run is over and the next one not yet known: that one ends before it begins."""
    plan = Plan("x", "", 0, PlannedJob(("/bin/true",), str(tmp_path), {}, 1, 1, 60.0), (), ())
    one, interrupt = ScenarioRun(plan, RunDir(tmp_path / "run"), b"", []), Interrupt()
    interrupt(signal.SIGTERM, None)
    interrupt.ends(one)
    assert one._stopped == "SIGTERM ended it"


def test_nohup_stays_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts torchaos so that it outlives the terminal means it; the other signals end it all the same."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.reason is None
            signal.raise_signal(signal.SIGTERM)
            assert interrupt.reason == "SIGTERM ended it"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nobody_is_waited_for_beyond_the_end_of_the_run(sleeper: int) -> None:
    """A grace period ends with the run: what is done to the target later would be done to a run that is over."""
    ended = threading.Event()
    ticks = start_ticks(sleeper)
    assert ticks is not None
    site = OutsideSite("go", [Victim(sleeper, ticks, 0)], lambda *_: None, run_ended=ended)  # type: ignore[arg-type]
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
    monkeypatch.setattr(run, "_watch", lambda: wait_until(lambda: ended.is_file() and ended.read_text() != ""))
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
        Plan("x", "", 0, PlannedJob(("a",), "/", {}, 1, 1, 1.0), (), ()),
        RunDir(tmp_path / "x"),
        tmp_path,
        b"",
        (),
        Ask(),
        (),
        (),
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
