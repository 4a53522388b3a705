"""Observers of a running job, and the questions about what they see."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Mapping, Protocol, Sequence

from torchaos.harness.agent.wire import Event, Kind

if TYPE_CHECKING:
    from torchaos.harness.record.plan import PlannedFault

Emit = Callable[[Kind, Mapping[str, Any]], Event]


class Probe(Protocol):
    """Observes from outside, and only emits events. `sample` is called every `period_s` seconds."""

    period_s: float

    def sample(self, emit: Emit) -> None: ...


@dataclass(frozen=True)
class Watched:
    """Where the probes of conditions look. `mark`: the run id that a command which they start must carry."""

    run_dir: Path
    checkpoints: Path | None
    mark: str
    ended: threading.Event = field(default_factory=threading.Event)


class Condition(Protocol):
    """Something that holds or not, seen from the events so far. A frozen dataclass: fields come from the scenario. All
    but `holds` is optional: the registry gives it to a class that lacks it."""

    about_job: ClassVar[bool] = True  # as a stop condition it says something about the job, and not about the machine

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        """Pure. `now_s` is CLOCK_MONOTONIC. None: not known (yet)."""

    def probes(self, at: Watched) -> Sequence[Probe]:
        """Probes to run while the run lasts. Equal probes of several conditions run once."""
        return ()

    @staticmethod
    def of_faults(params: Mapping[str, Any], faults: Sequence[PlannedFault]) -> Mapping[str, Any]:
        """Parameters that are derived from the planned faults, and replace those in the scenario. Raises UsageError."""
        return {}
