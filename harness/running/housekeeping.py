"""The runs of this user on this machine: lists them, ends them, and removes old run directories.

`at_work` registers each torchaos command while it runs, in the file STATE/commands/PID-TICKS. So another terminal can
list and end the command, also between two of its runs (while a twin is copied or a verdict is made).

`overview` lists the runs, live or left over, from the registry of open runs, the undo logs and the journals. It changes
nothing.

`halt` ends runs normally, with their undo. Processes that do not end in time are killed, and their changes are then
undone.

`finished` and `remove` are for run directories that the user wants to remove by age or size. A run that is still in
progress, or may have changes to undo, is never removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torchaos.harness.host import processes
from torchaos.harness.host.disk import owner_only, write_atomically
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.orphaned_runs import Recovered, await_reapers, find, left_over, recover
from torchaos.harness.rollback.undo_log import OpenRun, State, Who


@dataclass(frozen=True)
class Command:
    """A torchaos command that is running."""

    who: Who
    boot: str
    host: str
    since_s: float  # seconds since the epoch
    scenarios: tuple[str, ...]

    @property
    def is_alive(self) -> bool:
        return self.host == processes.host() and self.boot == processes.boot_id() and processes.is_alive(*self.who)


@contextmanager
def at_work(scenarios: Sequence[str]) -> Iterator[None]:
    """Registers this process for the duration of the block. Raises OSError if the state directory can't be used."""
    who = (os.getpid(), processes.ticks_of(os.getpid()))
    command = Command(who, processes.boot_id(), processes.host(), time.time(), tuple(scenarios))
    path = undo_log.private(undo_log.state_home() / "commands") / f"{who[0]}-{who[1]}"
    write_atomically(path, json.dumps(asdict(command)), private=True)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def living() -> list[Command]:
    """The commands that are alive on this machine. Removes the entries of dead processes. Raises OSError if the state
    directory can't be used."""
    found = []
    for path in sorted(undo_log.private(undo_log.state_home() / "commands").glob("[0-9]*-*")):
        try:
            with open(path, opener=owner_only) as file:
                raw = json.load(file)
            command = Command(tuple(raw["who"]), raw["boot"], raw["host"], raw["since_s"], tuple(raw["scenarios"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the command ended just now
        if command.is_alive:
            found.append(command)
        elif command.host == processes.host():
            path.unlink(missing_ok=True)
    return found


Life = Literal["live", "ending", "left", "elsewhere"]


@dataclass(frozen=True)
class RunView:
    """One run of this user. `life`: "live"; "ending": the harness is dead, and its reaper is undoing everything;
    "left": harness and reaper are dead; "elsewhere": the run is on another machine."""

    run_id: str
    run_dir: str
    life: Life
    scenario: str
    stage: str
    since_s: float  # seconds since the epoch
    faults: tuple[str, ...]  # faults that are armed or applied and not yet undone
    harness: int | None  # pids of live processes
    reaper: int | None
    job: tuple[int, ...]


def overview() -> tuple[list[RunView], list[Recovered]]:
    """All runs of this user, and the problems of runs that could not be read. A command that is between two runs is
    included, without a run id."""
    runs, problems = find(())
    views = [_view(run) for run in runs]
    busy = {view.harness for view in views}
    with suppress(OSError):
        for command in living():
            if command.who[0] not in busy:
                names = ", ".join(command.scenarios)
                views.append(
                    RunView("", "", "live", names, "between runs", command.since_s, (), command.who[0], None, ())
                )
    return views, problems


def _view(run: OpenRun) -> RunView:
    folder = RunDir(Path(run.run_dir))
    harness, reaper = (who[0] if run.here and run.lives(who) else None for who in (run.harness, run.reaper))
    life: Life = "elsewhere" if not run.here else "live" if harness else "ending" if reaper else "left"
    return RunView(
        run.run_id, run.run_dir, life, _scenario(folder), _stage(folder), run.since_s, _faults(run.folder),
        harness, reaper, tuple(sorted(processes.family(run.run_id))) if run.here else (),
    )  # fmt: skip


def _scenario(folder: RunDir) -> str:
    with suppress(OSError, ValueError, AttributeError):
        return str(json.loads(folder.plan.read_text()).get("scenario", ""))
    return ""


def _stage(folder: RunDir) -> str:
    """The last stage that the run began. Empty if no stage is known."""
    last: dict[str, Any] = {}
    with suppress(OSError, ValueError, AttributeError):
        marked = f'"{Kind.STAGE.value}"'.encode()
        lines = [line for line in (folder.events / "harness.jsonl").read_bytes().splitlines() if marked in line]
        last = json.loads(lines[-1])["data"] if lines else {}
    return str(last.get("stage", ""))


def _faults(folder: Path) -> tuple[str, ...]:
    with suppress(OSError):
        records, _damaged = undo_log.read(folder)
        on = [
            record
            for record in records
            if record.open and record.state in (State.MAYBE_APPLIED, State.APPLIED, State.FAILED)
        ]
        return tuple(dict.fromkeys(record.owner for record in on))
    return ()


IN_ORDER_S = 120.0  # seconds for a run to end with evidence and verdict; after that it is hurried
HURRIED_S = 60.0  # seconds for the undo alone; after that the harness is killed, and its reaper undoes the rest
REAPER_S = 120.0
_LOOK_S = 0.05


def halt(chosen: Sequence[int] | None, now: bool, say: Callable[[str], None]) -> tuple[int, list[Recovered]]:
    """Ends runs. `chosen`: the pids of the harnesses whose runs are ended; None: all. `now`: evidence and verdicts are
    not waited for. `say`: receives progress messages. Returns the number of harnesses that were ended, and the results
    of all recoveries, including those that failed. Raises OSError if the state directory can't be used."""
    ended = [who for who in _living() if chosen is None or who[0] in chosen]
    with _marked(ended):
        return len(ended), _halted(ended, chosen, now, say)


def is_halted() -> bool:
    """Whether `halt` is ending this process. It may be called from a signal handler."""
    with suppress(OSError):
        return _mark((os.getpid(), processes.ticks_of(os.getpid()))).exists()
    return False


def _mark(who: Who) -> Path:
    return undo_log.private(undo_log.state_home() / "halts") / f"{who[0]}-{who[1]}"


@contextmanager
def _marked(ended: Sequence[Who]) -> Iterator[None]:
    """Marks processes as ended by `halt`, so that they can say what ended them: a signal does not show its sender."""
    marks = [_mark(who) for who in ended]
    for mark in marks:
        mark.touch(mode=0o600)
    try:
        yield
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def _halted(
    ended: Sequence[Who], chosen: Sequence[int] | None, now: bool, say: Callable[[str], None]
) -> list[Recovered]:  # fmt: skip
    """Ends these processes, and returns the results of the recoveries."""

    def own() -> list[OpenRun]:
        return [run for run in find(())[0] if chosen is None or run.harness in ended]

    _send(ended, signal.SIGTERM, signal.SIGCONT)  # a stopped process can't act on SIGTERM
    if not now:
        _wait(ended, IN_ORDER_S)
    if slow := [who for who in ended if processes.is_alive(*who)]:
        if not now:
            say(f"{_pids(slow)} did not end within {IN_ORDER_S:.0f} s; now it is hurried")
        _send(slow, signal.SIGINT)  # not SIGTERM again: the kernel merges pending signals of the same number
        _wait(slow, HURRIED_S)
    if stuck := [who for who in ended if processes.is_alive(*who)]:
        say(f"{_pids(stuck)} did not end within {HURRIED_S:.0f} s; killed, and rolled back by the reaper")
        processes.kill(dict(stuck), time.monotonic() + HURRIED_S)
    await_reapers(own, REAPER_S)
    runs, problems = own(), find(())[1] if chosen is None else []
    hung = [run.reaper for run in runs if run.here and run.lives(run.reaper) and not run.lives(run.harness)]
    if hung:
        say(f"reaper {_pids(hung)} did not end within {REAPER_S:.0f} s; killed, and rolled back from the log")
        processes.kill(dict(hung), time.monotonic() + HURRIED_S)
    return [*problems, *(recover(run) for run in left_over(runs))]


def _living() -> list[Who]:
    runs, _problems = find(())
    found = {command.who for command in living()} | {r.harness for r in runs if r.here and r.lives(r.harness)}
    return sorted(who for who in found if not processes.is_own(who[0]))


def _send(whom: Iterable[Who], *numbers: int) -> None:
    for pid, ticks in whom:
        with suppress(OSError), processes.hold(pid, ticks) as fd:
            for number in numbers if fd is not None else ():
                assert fd is not None
                signal.pidfd_send_signal(fd, number)


def _wait(whom: Iterable[Who], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and any(processes.is_alive(*who) for who in whom):
        time.sleep(_LOOK_S)


def _pids(whom: Iterable[Who]) -> str:
    return ", ".join(f"process {pid}" for pid, _ticks in whom)


@dataclass(frozen=True)
class Finished:
    folder: Path
    age_s: float  # seconds since a file directly in it last changed, by the wall clock
    size: int  # bytes on disk


def finished(out: Path) -> list[Finished]:
    """The finished run directories in the folder `out`, the oldest first. While another command runs, directories
    without a verdict are left out, because one of them may belong to a run that has just begun and has written no undo
    yet. Raises OSError if `out` can't be read."""
    busy = {Path(run.run_dir) for run in find(())[0]}
    at_work = bool(living())
    found = [
        _measure(folder)
        for folder in out.resolve().iterdir()
        if folder not in busy and _is_finished(folder) and not (at_work and not (folder / "result.json").exists())
    ]
    return sorted(found, key=lambda run: -run.age_s)


def to_remove(runs: list[Finished], older_s: float | None, beyond: int | None) -> Iterator[Finished]:
    """Yields the runs to remove: first all runs older than `older_s` seconds, then the oldest of the rest, until at
    most `beyond` bytes are left. `runs` must have the oldest first."""
    left = sum(run.size for run in runs)
    for run in runs:
        if (older_s is not None and run.age_s > older_s) or (beyond is not None and left > beyond):
            left -= run.size
            yield run


def remove(run: Finished) -> None:
    """Removes a run directory. Its plan is removed first, so that a half-removed folder no longer counts as a run
    directory. Raises OSError if it can't be removed."""
    (run.folder / "plan.json").unlink(missing_ok=True)
    shutil.rmtree(run.folder)


def _is_finished(folder: Path) -> bool:
    """Whether the folder is a run directory of this user in which everything was undone, by its undo log."""
    if folder.is_symlink() or not (folder / "plan.json").is_file() or folder.stat().st_uid != os.geteuid():
        return False
    if not undo_log.path_of(folder).exists():  # no change was ever written to the undo log
        return (folder / "undo").is_dir()
    try:
        records, damaged = undo_log.read(folder)
    except OSError:
        return False
    return not damaged and not any(record.open for record in records)


def _measure(folder: Path) -> Finished:
    newest, size = 0.0, 0
    for path in (folder, *folder.rglob("*")):
        try:
            found = path.lstat()
        except OSError:
            continue
        newest = max(newest, found.st_mtime) if path.parent == folder or path == folder else newest
        size += found.st_blocks * 512
    return Finished(folder, max(0.0, time.time() - newest), size)
