"""Everything that a run left, for assertions and injectors to judge. It is read-only, and opens no file later."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Mapping, Sequence

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import UsageError
from torchaos.harness.machine.memory import uncollected
from torchaos.harness.record.events.gaps import Gaps
from torchaos.harness.record.events.journal import read_journal
from torchaos.harness.record.events.of_run import RunEvents
from torchaos.harness.record.history import History
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.record.secrecy import mask

_LOG_END = 1 << 18  # bytes; the first error of a job is followed by those of its restarts


@dataclass(frozen=True)
class Record(RunEvents):
    plan: Plan
    events: Sequence[Event]  # merged, in order of time
    artifacts: Mapping[str, Any]  # by file name without .json: "inventory", "environment"
    damaged: tuple[str, ...] = ()  # whole lines of the journal that can't be read
    gaps: tuple[str, ...] = ()  # events that are missing, in words
    log_end: tuple[str, ...] = ()  # the last lines of the job's log, without secrets

    @cached_property
    def history(self) -> History:
        return History.of(self.events)

    @cached_property
    def exited(self) -> Event | None:
        """The event of the end of the job's last command, if that was seen."""
        return next((event for event in reversed(self.beside_steps) if event.kind is Kind.JOB_EXITED), None)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the job's last command. None: not seen."""
        return self.exited.data["exit_code"] if self.exited else None

    @cached_property
    def stopped(self) -> Event | None:
        """The event that says why the run was ended before the job ended by itself. None if there is none. The job may
        still have saved, and may have ended with exit code 0."""
        return next(self.of_kind(Kind.STOPPED), None)

    @property
    def ended_on_purpose(self) -> bool:
        """Whether the scenario ended the run on purpose (`until`)."""
        return any(event.data.get("enough") for event in self.of_kind(Kind.STOPPED))

    @classmethod
    @uncollected()
    def load(cls, folder: RunDir) -> Record:
        """Reads a run directory. Raises UsageError if a needed file is missing or damaged."""
        try:
            artifacts = {path.stem: json.loads(path.read_text()) for path in sorted(folder.artifacts.glob("*.json"))}
            damaged, gaps = list[str](), Gaps()
            events = read_journal(folder.events, damaged, gaps)
            plan, missing = Plan.read(folder.plan), tuple(gaps.in_words())
            return cls(plan, events, artifacts, tuple(damaged), missing, _log_end(folder))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{folder.root}: it can't be judged, a file is missing or damaged: {error}") from error


def _log_end(folder: RunDir) -> tuple[str, ...]:
    """The end of the last submission's log; empty if there is none."""
    logs = sorted(folder.logs.glob("job-*.log"), key=lambda path: (len(path.name), path.name))
    if not logs:
        return ()
    with open(logs[-1], "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_END))
        return tuple(mask(file.read(_LOG_END).decode(errors="replace")).splitlines())
