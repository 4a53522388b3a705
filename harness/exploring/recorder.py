"""Records what a run does to its checkpoint folder: meanwhile, the folder is served over itself by FUSE (serving.py).
FUSE sees writes of native code (the zip files of torch.save, safetensors, io_uring) and of all processes, in one order,
and needs no hooks in the ranks. It costs a copy and a digest of all bytes that are written."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torchaos.harness.agent.plan import AgentPlan
from torchaos.harness.agent.stamps import Stamp
from torchaos.harness.agent.wire import Event
from torchaos.harness.contracts import ChaosError
from torchaos.harness.exploring.blobs import Blobs
from torchaos.harness.exploring.cover import Cover
from torchaos.harness.exploring.notes import Notes
from torchaos.harness.exploring.operations import Kind, Operation, Recording
from torchaos.harness.exploring.order import order
from torchaos.harness.exploring.steps import with_steps
from torchaos.harness.exploring.tree import Tree
from torchaos.harness.record.events.journal import read_events

# The agent's hooks that show when ranks wait for each other. Without them, only the recorded order of operations is
# tried. And the hook that shows what a rank imports, for forked ranks.
HOOKS = ("collectives", "imported", "stamps")


class Recorder(Cover):
    """Records the operations of a job in its checkpoint folder: `with Recorder(folder, home) as recorder: run the job`,
    and then read `recorder.recording`. `folder`: the checkpoint folder; it is made if it does not exist. `home`: the
    folder for the recording's own files, on a disk with room for all bytes that the run writes. The contents that
    `folder` had before are copied, and kept as `recording.base`."""

    server = f"{__package__}.serving"
    notes = Notes.NAMES

    def __enter__(self) -> Recorder:
        super().__enter__()
        self._began_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended_s = time.monotonic()
        super().__exit__(kind, error, at)
        self._events = events_of(self.home)  # now, because the caller may move the run

    @property
    def recording(self) -> Recording:
        """The recording, after the `with` block. Raises ChaosError if it is not complete, and OSError."""
        if self.failed:
            raise ChaosError(f"{self._folder}: the recording is not whole: {self.failed}")
        return read(self.home, self._base, self._events, self._began_s, self._ended_s)

    def _prepare(self) -> None:
        blobs = Blobs(self.home / "blobs")
        self._base = blobs.take(self._folder)
        blobs.close()


def read(
    home: Path, base: Tree, events: Sequence[Event], began_s: float, ended_s: float, stored: bool = False
) -> Recording:  # fmt: skip
    """The recording whose notes are in `home`. `events`: those of the ranks. `stored`: the files are the objects of a
    store. Raises OSError."""
    operations = tuple(Operation(**{**raw, "kind": Kind(raw["kind"])}) for raw in _lines(home / "operations"))
    stamps = [Stamp(**{**raw, "ranks": raw["ranks"] and tuple(raw["ranks"])}) for raw in _lines(home / "collectives")]
    before, unsure = order(operations, stamps)
    doubts = (*unsure, *map(str, _lines(home / Notes.DOUBTS)), *(_shared(operations) if stored else ()))
    blobs = Blobs(home / "blobs")
    return Recording(with_steps(operations, events), before, base, blobs, began_s, ended_s, doubts, stored)


def _shared(operations: Sequence[Operation]) -> Iterator[str]:
    """A sentence for each object that several ranks changed: which of them is the last one is chance."""
    ranks = defaultdict[str, set[int | None]](set)
    for operation in operations:
        ranks[operation.path].add(operation.rank)
    for path in sorted(path for path in ranks if len(ranks[path]) > 1):
        yield f"several processes changed the object {path}: the order of these requests is tried only as it was seen"


def events_of(home: Path) -> list[Event]:
    """The events of the ranks whose agent plans are noted in `home`."""
    try:
        plans = [AgentPlan.read(line) for line in (home / "plans").read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [event for plan in plans for event in read_events(Path(plan.events))]


def _lines(path: Path) -> list[Any]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
