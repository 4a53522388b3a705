"""Turns the lines of a job's output into events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.watching.probes.causes import CauseReader
from torchaos.harness.watching.probes.log_adapters import Adapter
from torchaos.harness.watching.probes.torchelastic import ElasticReader


class JobLog:
    """`line` is called from the thread that reads the output; an error in here must not stop that thread."""

    def __init__(self, journal: Journal, adapter: Adapter | None, watchdogs: Sequence[str] = ()) -> None:
        """`watchdogs`: see CauseReader."""
        self._journal, self._adapter, self._watchdogs = journal, adapter, watchdogs
        self._failed = False
        self.by_round = False  # of a job on several nodes, see wire.attempt_of
        self.replica: int | None = None  # whose output it is, where there are several
        self.first_rank = 0  # its number in the whole job: torchelastic counts from 0 in each replica
        self.host_pid: Callable[[int], int | None] = int  # of a pid that the node's torchrun names
        self.begin(0)

    def begin(self, attempt_base: int) -> None:
        """A new submission: torchelastic counts its restarts from 0 again."""
        self._base = attempt_base
        self._elastic, self._causes = ElasticReader(self.by_round), CauseReader(self._watchdogs)

    def in_round(self, number: int) -> None:
        """The attempt that the job is in now, where somebody else than its output tells of it."""
        self._elastic.restarts = number

    def emit(self, kind: Kind, data: Mapping[str, Any]) -> Event:
        """For what belongs to the attempt that the job is in now."""
        return self._journal.emit(kind, self._told(data), attempt=self._base + self._elastic.restarts)

    def line(self, text: str, mono_s: float) -> None:
        if self._failed:
            return
        try:
            self._read(text, mono_s)
        except Exception as error:
            self._failed = True
            note = f"the job's output is no longer read: {type(error).__name__}: {error}"
            self._journal.emit(Kind.NOTE, {"text": note})

    def _read(self, text: str, mono_s: float) -> None:
        for said in self._elastic.read(text):
            attempt = self._base + self._elastic.restarts
            outside = {"pid": self.host_pid(said.data["pid"]) or said.data["pid"]} if "pid" in said.data else {}
            data = {**said.data, **outside}
            rank = None if said.rank is None else self.first_rank + said.rank
            self._journal.emit(said.kind, self._told(data), rank=rank, attempt=attempt, mono_s=mono_s)
        attempt = self._base + self._elastic.restarts
        for cause in self._causes.read(text, self._elastic.restarts):
            self._journal.emit(cause.kind, self._told(cause.data), attempt=attempt, mono_s=mono_s)
        if self._adapter and (one := self._adapter.read(text)):
            data = {"step": one.step, "loss": one.loss, "lr": one.lr, "adapter": self._adapter.name}
            self._journal.emit(Kind.LOG_STEP, self._told(data), attempt=attempt, mono_s=mono_s)

    def _told(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        return data if self.replica is None else {**data, "replica": self.replica}
