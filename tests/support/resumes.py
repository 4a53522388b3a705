"""The record of a resume, made by hand: an ideal trainer that ran to its end, its events up to a death, and the next
attempt."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchaos.harness.crash_explorer import synthetic_crash
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.plan import Named
from torchaos.harness.record.record import Record


def _trainer() -> Any:
    """The trainer of the assertions' tests, which the import mode keeps other tests from importing."""
    path = Path(__file__).parents[1] / "assertions" / "builder.py"
    spec = importlib.util.spec_from_file_location("torchaos_test_builder", path)
    assert spec
    assert spec.loader
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(module, "Trainer"):
        spec.loader.exec_module(module)
    return module.Trainer


Trainer = _trainer()
ASSERTS = tuple(Named(name, {}) for name in ("loss_continuity", "sample_accounting", "no_lost_work"))
LATER_S = 1000.0


def recorded(trainer: Any = None) -> Record:
    """The recorded run: 30 steps of 2 ranks, a save every 5, unless the trainer says otherwise."""
    run: Record = (trainer or Trainer()).record()
    return replace(run, plan=replace(run.plan, asserts=ASSERTS))


def after_step(run: Record, step: int) -> float:
    """The time just after the step and its save, CLOCK_MONOTONIC."""
    nexts = [execution.mono_s for execution in run.history.executions if execution.global_step == step + 1]
    ends = [event.mono_s for event in run.of_kind(Kind.AGENT_ENDED)]
    return min([*nexts, *ends]) - 0.001


def next_attempt(of: Record, since_s: float, until: int, number: int) -> list[Event]:
    """The events of the last attempt of a run that really died, up to the global step `until` and the save after it,
    shifted to `since_s` as the attempt `number` of a resume."""
    last, end_s = of.history.attempts[-1], after_step(of, until)
    moved = since_s + 1.0 - last.started_s
    own = [event for event in of.events if event.attempt == last.number and event.mono_s < end_s]
    source = f"resume-{number}"
    return [
        replace(event, attempt=number, mono_s=event.mono_s + moved, source=f"{event.source}-{source}") for event in own
    ]


def resumed(
    folder: Path, died_after: int, resume: Any, end: Sequence[tuple[Kind, dict[str, object]]], until: int = 20,
    run: Record | None = None,
) -> Record:  # fmt: skip
    """A recorded run that is cut by a death after the step `died_after`, and is continued by the last attempt of
    `resume`. `end`: the harness's events at the end. `run`: the recorded run, if it is not a complete one."""
    run = run or recorded()
    folder.mkdir(exist_ok=True)
    later_s = LATER_S * (1 + len(run.history.attempts))
    synthetic_crash.write(folder, run, after_step(run, died_after), {}, later_s)
    events = [
        *read_events(folder),
        Event(Kind.JOB_STARTED, "harness", 0, 0, later_s, data={"submission": 0, "pid": 60}),
    ]
    events += next_attempt(resume.record(), later_s, until, len(run.history.attempts))
    for number, (kind, data) in enumerate(end, 1):
        events.append(Event(kind, "harness", number, 0.0, events[-1].mono_s + 0.1, data=data))
    return Record(synthetic_crash.with_death(run.plan), tuple(sorted(events, key=lambda event: event.mono_s)), {})


ENOUGH = (Kind.STOPPED, {"reason": "it went on beyond the death", "interrupted": False, "enough": True})
ENDED: tuple[Kind, dict[str, object]] = (Kind.JOB_EXITED, {"submission": 0, "pid": 60, "exit_code": 0})
FAILED = (Kind.JOB_EXITED, {"submission": 0, "pid": 60, "exit_code": 1})
