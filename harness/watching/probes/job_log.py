"""Makes events from the lines of a job's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.watching.probes.causes import CauseReader
from torchaos.harness.watching.probes.log_adapters import Adapter
from torchaos.harness.watching.probes.torchelastic import ElasticReader


class JobLog:
    """Reads the job's output line by line. `line` is called from the thread that reads the output; an error here must
    not stop that thread."""

    def __init__(self, journal: Journal, adapter: Adapter | None, watchdogs: Sequence[str] = ()) -> None:
        """`watchdogs`: see CauseReader."""
        self._journal, self._adapter, self._watchdogs = journal, adapter, watchdogs
        self._failed = False
        self.by_round = False  # True for a job on several nodes, see wire.attempt_of
        self.replica: int | None = None  # the replica whose output it is, if there are several
        self.first_rank = 0  # number of the replica's first rank in the whole job; torchelastic counts from 0
        self.host_pid: Callable[[int], int | None] = int  # makes the host's pid from a pid in the node's output
        self.begin(0)

    def begin(self, attempt_base: int) -> None:
        """Must be called when a new submission starts: torchelastic counts its restarts from 0 again."""
        self._base = attempt_base
        rounds = self._journal.catch_up if self.by_round else None
        self._elastic, self._causes = ElasticReader(rounds), CauseReader(self._watchdogs)

    def begin_again(self, attempt_base: int) -> None:
        """Notes that a torchrun has started, and the number of its first attempt. If the number is new, this is a later
        torchrun of the same submission, and its attempts are counted from that number."""
        if attempt_base != self._base:
            self.begin(attempt_base)

    def in_round(self, number: int) -> None:
        """Sets the current attempt, if it is known from another source than the output."""
        self._elastic.restarts = number

    def emit(self, kind: Kind, data: Mapping[str, Any]) -> Event:
        return self._journal.emit(kind, self._with_replica(data), attempt=self._base + self._elastic.restarts)

    def line(self, text: str, mono_s: float) -> None:
        """Reads one line. `mono_s`: when it came, CLOCK_MONOTONIC."""
        if self._failed:
            return
        try:
            self._read(text, mono_s)
        except Exception as error:
            self._failed = True
            note = f"the job's output is no longer read: {type(error).__name__}: {error}"
            self._journal.emit(Kind.NOTE, {"text": note})

    def _read(self, text: str, mono_s: float) -> None:
        for fact in self._elastic.read(text):
            attempt = self._base + (fact.restarts or 0)
            outside = {"pid": self.host_pid(fact.data["pid"]) or fact.data["pid"]} if "pid" in fact.data else {}
            data = {**fact.data, **outside}
            rank = None if fact.rank is None else self.first_rank + fact.rank
            self._journal.emit(fact.kind, self._with_replica(data), rank=rank, attempt=attempt, mono_s=mono_s)
        attempt = self._base + self._elastic.restarts
        for cause in self._causes.read(text, self._elastic.restarts):
            self._journal.emit(cause.kind, self._with_replica(cause.data), attempt=attempt, mono_s=mono_s)
        if self._adapter and (step := self._adapter.read(text)):
            data = {"step": step.step, "loss": step.loss, "lr": step.lr, "adapter": self._adapter.name}
            self._journal.emit(Kind.LOG_STEP, self._with_replica(data), attempt=attempt, mono_s=mono_s)

    def _with_replica(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        return data if self.replica is None else {**data, "replica": self.replica}
