"""Lists the runs of this user, live or left over, from the registry of open runs, the undo logs and the journals.
Nothing is changed."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchaos.harness.agent.wire import Kind
from torchaos.harness.machine import proc
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.upkeep import commands
from torchaos.harness.undo import log
from torchaos.harness.undo.log import State
from torchaos.harness.undo.open_runs import OpenRun
from torchaos.harness.undo.recovery import Recovered, find

Life = Literal["live", "ending", "left", "elsewhere"]


@dataclass(frozen=True)
class RunView:
    """One run of this user. `life`: "live"; "ending": the harness is dead and its reaper undoes everything; "left":
    both are dead; "elsewhere": on another machine."""

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
    shown without a run id."""
    runs, problems = find(())
    views = [_view(run) for run in runs]
    busy = {view.harness for view in views}
    with suppress(OSError):
        for command in commands.living():
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
        harness, reaper, tuple(sorted(proc.family(run.run_id))) if run.here else (),
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
        records, _damaged = log.read(folder)
        on = [
            record
            for record in records
            if record.open and record.state in (State.MAYBE_APPLIED, State.APPLIED, State.FAILED)
        ]
        return tuple(dict.fromkeys(record.owner for record in on))
    return ()
