"""The interfaces of probes and conditions, which observe a running job, and of checkpoint formats."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torchaos.harness.agent.wire import Event, Kind

if TYPE_CHECKING:
    from torchaos.harness.record.plan import PlannedFault


# The interfaces of observers of a running job, and of conditions on their observations.

Emit = Callable[[Kind, Mapping[str, Any]], Event]


class Probe(Protocol):
    """Observes the job from outside, and changes nothing: it only emits events. `sample` is called every `period_s`
    seconds."""

    period_s: float

    def sample(self, emit: Emit) -> None: ...


@dataclass(frozen=True)
class Watched:
    """The folders that the probes of conditions may read. `mark`: the run id, which every command that a probe starts
    must have in its environment."""

    run_dir: Path
    checkpoints: Path | None
    mark: str
    ended: threading.Event = field(default_factory=threading.Event)


class Condition(Protocol):
    """A statement about the run that is true or false, judged from the events so far. A frozen dataclass: its fields
    come from the scenario. Everything except `holds` is optional: the registry adds it to a class that lacks it."""

    about_job: ClassVar[bool] = True  # it is about the job; False: about the machine. Read for stop conditions

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        """Whether the condition is true now; None: not known, or not known yet. Pure. `now_s`: seconds of
        CLOCK_MONOTONIC."""

    def probes(self, at: Watched) -> Sequence[Probe]:
        """The probes that must run during the run. Equal probes of several conditions run once."""
        return ()

    @staticmethod
    def of_faults(params: Mapping[str, Any], faults: Sequence[PlannedFault]) -> Mapping[str, Any]:
        """Parameters that are computed from the planned faults. They replace the parameters in the scenario. Raises
        UsageError."""
        return {}


# The interface of a checkpoint format.


class CheckpointFormat(Protocol):
    """How checkpoints of one format are recognised and read. Inherit from `Format` in checkpoints/formats/format.py: it
    has a default for everything but the name."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def is_folder(self, files: Any, folder: str, names: Sequence[str]) -> bool: ...

    def read_file(self, files: Any, path: str, size: int, into: Any, prefix: str = "") -> None: ...

    def read_folder(self, files: Any, folder: str, into: Any, prefix: str = "") -> None: ...
