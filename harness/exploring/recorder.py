"""Records what a run does to its checkpoint folder: meanwhile, the folder is served over itself by FUSE (serving.py).
FUSE sees writes of native code (the zip files of torch.save, safetensors, io_uring) and of all processes, in one order,
and needs no hooks in the ranks. It costs a copy and a digest of all bytes that are written."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from torchaos.harness.agent.plan import AgentPlan
from torchaos.harness.agent.stamps import Stamp
from torchaos.harness.agent.wire import Event
from torchaos.harness.contracts import ChaosError
from torchaos.harness.exploring.blobs import Blobs
from torchaos.harness.exploring.cover import Cover
from torchaos.harness.exploring.operations import Kind, Operation, Recording
from torchaos.harness.exploring.order import order
from torchaos.harness.exploring.steps import with_steps
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
    notes = ("operations", "collectives", "plans")

    def __enter__(self) -> Recorder:
        super().__enter__()
        self._began_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended_s = time.monotonic()
        super().__exit__(kind, error, at)
        self._events = _events(self.home / "plans")  # now, because the caller may move the run

    @property
    def recording(self) -> Recording:
        """The recording, after the `with` block. Raises ChaosError if it is not complete, and OSError."""
        if self.failed:
            raise ChaosError(f"{self._folder}: the recording is not whole: {self.failed}")
        operations = tuple(Operation(**{**raw, "kind": Kind(raw["kind"])}) for raw in _lines(self.home / "operations"))
        stamps = [
            Stamp(**{**raw, "ranks": raw["ranks"] and tuple(raw["ranks"])}) for raw in _lines(self.home / "collectives")
        ]
        before, unsure = order(operations, stamps)
        return Recording(
            with_steps(operations, self._events), before, self._base, Blobs(self.home / "blobs"), self._began_s,
            self._ended_s, unsure,
        )  # fmt: skip

    def _prepare(self) -> None:
        blobs = Blobs(self.home / "blobs")
        self._base = blobs.take(self._folder)
        blobs.close()


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []


def _events(plans: Path) -> list[Event]:
    """The events of the runs with these agent plans."""
    try:
        agents = [AgentPlan.read(line) for line in plans.read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [event for agent in agents for event in read_events(Path(agent.events))]
