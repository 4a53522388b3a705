"""The interfaces of probes, which observe a running job, and of checkpoint formats."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torchaos.harness.protocol.wire import Event, Kind

Emit = Callable[[Kind, Mapping[str, Any]], Event]


class Probe(Protocol):
    """Observes the job from outside, and changes nothing: it only emits events. `sample` is called every `period_s`
    seconds."""

    period_s: float

    def sample(self, emit: Emit) -> None: ...


@dataclass(frozen=True)
class Watched:
    """The folders that the probes of conditions may read. `mark`: the mark that every command of such a probe must have
    in its environment. `ended`: set when the run ends."""

    run_dir: Path
    checkpoints: Path | None
    mark: str
    ended: threading.Event = field(default_factory=threading.Event)


class CheckpointFormat(Protocol):
    """How checkpoints of one format are recognised and read. Inherit from `Format` in checkpoints/formats/format.py: it
    has a default for everything but the name."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def is_folder(self, files: Any, folder: str, names: Sequence[str]) -> bool: ...

    def read_file(self, files: Any, path: str, size: int, into: Any, prefix: str = "") -> None: ...

    def read_folder(self, files: Any, folder: str, into: Any, prefix: str = "") -> None: ...
