"""Finds runs that ended without their undo, and undoes their changes from their undo logs: on request, before each run,
and after a reboot.

A run whose harness or reaper is alive is left alone, because that process undoes its changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.handles import JobProcesses, to_json
from torchaos.harness.rollback.reaper import UndoExecutor, UndoResult
from torchaos.harness.rollback.reaper_client import Busy, UndoError, undo_from_log
from torchaos.harness.rollback.undo_log import OpenRun, UndoRecord

PROBES = ".probes"  # the mark of commands that conditions run is the run's id with this suffix
_LOOK_S = 0.05  # seconds
_REAPERS_S = 60.0  # seconds for which a new run waits for the reapers of earlier runs


class LeftBehind(ChaosError):
    """A change of an earlier run could not be undone."""

    exit_code = 4


@dataclass(frozen=True)
class Recovered:
    run_id: str
    run_dir: str
    results: tuple[UndoResult, ...] = ()  # the results of the handles that were undone now
    problem: str = ""  # why the run was not touched, or may not be clean
    note: str = ""
    spared: bool = False  # another process, or another machine, has to undo the run's changes

    @property
    def clean(self) -> bool:
        return not self.problem and all(each.verified for each in self.results)


def find(folders: Sequence[Path]) -> tuple[list[OpenRun], list[Recovered]]:
    """The runs that may have something to undo, and problems with runs that can't be read. `folders`: run directories,
    or folders that contain run directories; empty: all runs in the registry. Runs in which everything is known to be
    undone are left out."""
    if not folders:
        try:
            runs, problems = undo_log.entries()
        except OSError as error:
            return [], [Recovered("?", "", problem=f"the registry of runs can't be read: {error}")]
        return runs, [Recovered("?", "", problem=problem) for problem in problems]
    runs, bad = [], []
    for folder in folders:
        inside = (
            [folder] if undo_log.path_of(folder).exists() else sorted(p.parents[1] for p in folder.glob("*/undo/*l"))
        )
        if not inside:
            bad.append(Recovered("?", str(folder), problem="there is no undo log in it, nor in the folders below"))
        for run_dir in inside:
            try:
                run = undo_log.of_folder(run_dir)
                records, damaged = undo_log.read(run_dir)
                if damaged or any(record.open for record in records):
                    runs.append(run)
            except (OSError, ValueError) as error:
                bad.append(Recovered("?", str(run_dir), problem=str(error)))
    return runs, bad


def is_alive(run_dir: Path) -> bool:
    """Whether the harness of a run directory is a live process of this machine."""
    try:
        run = undo_log.of_folder(run_dir)
    except (OSError, ValueError):
        return False
    return run.here and run.lives(run.harness)


def recover(run: OpenRun, any_host: bool = False) -> Recovered:
    """Undoes the changes of a run, unless another process does. Removes the run's entry in the registry if everything
    is verified. `any_host`: also a run of another machine."""
    if not run.here and not any_host:
        return _spare(run, f"it ran on {run.host.partition('/')[0]}: recover it there")
    if run.lives(run.harness):
        return _spare(run, "it is still running; `torchaos halt` ends it")
    if run.lives(run.reaper):
        return _spare(run, f"its reaper, process {run.reaper[0]}, is undoing it")
    folder, note = run.folder, ""
    try:
        results = undo_from_log(folder)
        if not undo_log.path_of(folder).exists():
            note = "its run directory and undo log are gone: torchaos could only look for its processes"
        elif folder != Path(run.run_dir):
            note = "its run directory is gone; it was undone from the copy of its undo log"
        results += _strays(run)
    except Busy as error:
        return _spare(run, str(error))
    except UndoError as error:
        return Recovered(run.run_id, run.run_dir, problem=str(error))
    done = Recovered(run.run_id, run.run_dir, tuple(results), note=note)
    if done.clean:
        with suppress(OSError):
            undo_log.remove(run.run_id)
    return done


def _spare(run: OpenRun, problem: str) -> Recovered:
    return Recovered(run.run_id, run.run_dir, problem=problem, spared=True)


def left_over(runs: Iterable[OpenRun]) -> list[OpenRun]:
    """The runs whose harness is dead, and their reaper too."""
    return [run for run in runs if run.here and not run.lives(run.harness) and not run.lives(run.reaper)]


def await_reapers(
    runs: Callable[[], Iterable[OpenRun]], timeout_s: float, given_up: Callable[[], bool] = lambda: False
) -> None:
    """Waits at most `timeout_s` seconds for the reapers of runs whose harness is dead. Returns early if `given_up()` is
    true."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and not given_up():
        if not any(run.here and run.lives(run.reaper) and not run.lives(run.harness) for run in runs()):
            return
        time.sleep(_LOOK_S)


def await_ends(runs: Callable[[], Iterable[OpenRun]], timeout_s: float) -> None:
    """Waits at most `timeout_s` seconds for the end of the harnesses and reapers of these runs."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not any(run.here and (run.lives(run.harness) or run.lives(run.reaper)) for run in runs()):
            return
        time.sleep(_LOOK_S)


def before_a_run(given_up: Callable[[], bool] = lambda: False) -> list[Recovered]:
    """Undoes everything that earlier runs left behind. Every run begins with this. Raises LeftBehind if a change can't
    be undone. Takes milliseconds if nothing is left."""
    await_reapers(lambda: find(())[0], _REAPERS_S, given_up)
    runs, bad = find(())
    done = [*bad, *(recover(run) for run in left_over(runs))]
    for result in done:
        if not result.clean and not result.spared:
            raise LeftBehind(
                f"an earlier run left something that can't be undone, so nothing is run: "
                f"{result.run_dir or result.run_id}: {why(result)}. Repair it, then `torchaos recover`; or "
                f"`torchaos recover --forget`, if you know that nothing is left to undo"
            )
    return done


def why(result: Recovered) -> str:
    """Why the run is not clean. Empty if it is."""
    bad = [each for each in result.results if not each.verified]
    return result.problem or "; ".join(f"{in_words(each.handle)}: {each.reason}" for each in bad)


def in_words(handle: Mapping[str, Any]) -> str:
    """A handle in a few words: its kind, and the name or path of the thing."""
    name = next((handle[key] for key in ("path", "target", "run_id", "pid", "name") if key in handle), "")
    return f"{str(handle.get('kind', 'undo log')).replace('_', ' ')} {name}".strip()


def _strays(run: OpenRun) -> list[UndoResult]:
    """Kills processes that have the mark of the run, whether or not the log names them, and even if the run directory
    is gone. Returns the results."""
    marks = [JobProcesses(mark) for mark in sorted(processes.marks_of(run.run_id))]
    raw = [to_json(mark) for mark in marks if not mark.is_undone()]
    return UndoExecutor(None, [UndoRecord("strays", "job", raw)]).undo(None, "found by their mark") if raw else []
