"""Makes events from a job's output and from Lightning's CSV logger. Finds known failures in the output
(known_failures.py). A known failure changes the reason that a verdict gives, never the verdict
(analysis/explanations.py; the only exception is in analysis/ending).

torchrun's agent has two sources, and a version of torch may have only one of them: the event log (a JSON object per
event; handler `console`) and the agent's log lines (restarts only at level INFO). Observed with torch 2.13:

- The event log's `timestamp` is always 0, so lines are stamped on arrival. `worker_id` is the pid.
- An attempt that is retried has no FAILED event, only the line `failed (exitcode: -9) local_rank: 1 (pid: N)`.
- The state of the AGENT is SUCCEEDED even if the job failed, so it is not read.
- The ranks write to the same pipe, so a JSON object may be joined to other text on a line.

Lightning prints no losses. Its CSV logger writes `metrics.csv` with the columns epoch, step and the logged values. Each
restart opens a new folder (version_0, version_1, ...). The logger appends rows, and rewrites the whole file when a
column is added. Rows never change, so a changed file is read again, and known rows are skipped. `step` is Lightning's
global_step, which counts from 0."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchaos.harness.interfaces import Emit
from torchaos.harness.monitoring.probes.known_failures import BY_NAME as BY_NAME
from torchaos.harness.monitoring.probes.known_failures import CAUSES as CAUSES
from torchaos.harness.monitoring.probes.known_failures import Cause as Cause
from torchaos.harness.monitoring.probes.log_adapters import LIGHTNING, Adapter, LogStep, without_ansi
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Journal

_NAME = "metrics.csv"


class MetricsFile:
    """A probe that reads one file, or each metrics.csv below a folder that is written from now on."""

    period_s = 0.5

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since_s = time.time() - 1.0  # file times are coarser than the clock
        self._seen: dict[Path, tuple[tuple[int, int], int]] = {}  # (size, mtime), rows read

    def sample(self, emit: Emit) -> None:
        for path in self._files():
            try:
                found = path.stat()
                stamp, (before, rows) = (found.st_size, found.st_mtime_ns), self._seen.get(path, ((0, 0), 0))
                if stamp == before or found.st_mtime < self._since_s:
                    continue
                steps = list(read_metrics(path))
            except (OSError, UnicodeDecodeError, csv.Error):
                continue
            for step in steps[rows:]:
                emit(Kind.LOG_STEP, {"step": step.step, "loss": step.loss, "lr": step.lr, "adapter": LIGHTNING})
            self._seen[path] = stamp, max(rows, len(steps))

    def _files(self) -> list[Path]:
        if self._path.suffix == ".csv":
            return [self._path]
        folder = self._path
        return sorted([*folder.glob(_NAME), *folder.glob(f"*/{_NAME}"), *folder.glob(f"*/*/{_NAME}")])


def read_metrics(path: Path) -> Iterator[LogStep]:
    """Yields the rows with a training loss, in the order of the file. An incomplete last line is left out. Raises
    OSError, UnicodeDecodeError and csv.Error."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    for row in csv.DictReader(whole.splitlines()):
        loss = _value(row, lambda name: "loss" in name and not name.startswith(("val", "test")))
        step = row.get("step") or ""
        if loss is not None and step.isdigit():
            yield LogStep(int(step), loss, _value(row, lambda name: name.startswith("lr")))


def _value(row: Mapping[str, str | None], fits: Callable[[str], bool]) -> float | None:
    for name, text in row.items():
        try:
            if name and text and fits(name):
                return float(text)
        except ValueError:
            continue
    return None


_EVENT = re.compile(r'\{"name": "torchelastic\.worker\.status\.')
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_CLOSING = re.compile(r"Sending process (\d+) closing signal (SIG\w+|\d+)")
_RESTART = re.compile(r"Worker group (?:FAILED|UNHEALTHY)\. (\d+)/(\d+) attempts left; will restart worker group")
_MEMBERS = re.compile(r"Detected (\d+) new nodes? from group_rank=\d+; will restart worker group")
_RENDEZVOUS = re.compile(r"\[\S+\] Rendezvous'ing worker group")
_COUNT = re.compile(r"\]\s+restart_count=(\d+)\s*$")
_WORKER_STATES = ("START", "SUCCEEDED", "FAILED")


@dataclass(frozen=True)
class LogFact:
    """A fact from a log line, as an event. `restarts`: the agent's restart count, if the line has it."""

    kind: Kind
    data: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    restarts: int | None = None


def parse(line: str) -> Iterator[LogFact]:
    """Yields all facts about torchelastic in one line of the job's output. Most lines have none."""
    for start in _EVENT.finditer(line):
        yield from _event(line[start.start() :])
    if found := _FAILED.search(line):
        code, local_rank, pid = map(int, found.groups())
        yield LogFact(Kind.ELASTIC_FAILURE, {"exit_code": code, "local_rank": local_rank, "pid": pid})
    elif found := _CLOSING.search(line):
        yield LogFact(Kind.ELASTIC_TEARDOWN, {"pid": int(found[1]), "signal": _signal_name(found[2])})
    elif found := _RESTART.search(line):
        yield LogFact(Kind.ELASTIC_RESTART, {"attempts_left": int(found[1]), "of": int(found[2]), "why": "failure"})
    elif found := _MEMBERS.search(line):
        yield LogFact(Kind.ELASTIC_RESTART, {"attempts_left": None, "why": "membership", "new_nodes": int(found[1])})
    elif _RENDEZVOUS.search(line):
        yield LogFact(Kind.ELASTIC_RENDEZVOUS, {"done": False})
    elif found := _COUNT.search(line):
        yield LogFact(Kind.ELASTIC_RENDEZVOUS, {"done": True}, restarts=int(found[1]))


def _event(text: str) -> Iterator[LogFact]:
    try:
        raw, _end = json.JSONDecoder().raw_decode(text)
        body = raw["metadata"]
        details = json.loads(body["metadata"] or "{}")
        state, restarts = body["state"], int(body["agent_restarts"])
        if raw["source"] == "AGENT" and state == "RENDEZVOUS":
            yield LogFact(
                Kind.ELASTIC_RENDEZVOUS, {"done": True, "duration_s": body["duration_ms"] / 1e3}, None, restarts
            )
        elif raw["source"] == "WORKER" and state in _WORKER_STATES:
            pid, rank = int(body["worker_id"]), int(body["global_rank"])
            data = {"state": state, "pid": pid, **_first(details, "local_rank"), **_first(details, "exit_code")}
            yield LogFact(Kind.ELASTIC_WORKER, data, rank, restarts)
    except (ValueError, KeyError, TypeError, AttributeError):  # the JSON is torn, or of a version with another format
        return


def _first(details: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = (details.get(key) or [None])[0]
    return {} if value is None else {key: value}


def _signal_name(text: str) -> str:
    return signal.Signals(int(text)).name if text.isdigit() else text


class ElasticReader:
    """Reads the output of one submission. Adds the restart count and the rank of the pid to each fact.

    `read_rounds`: for a job on several nodes, where the agent's own count is not the number of the attempt. There,
    agent/startup.py writes events that set `restarts` and report the end of each rendezvous. `read_rounds` reads these
    events. It is called when a worker starts, because they were written before that, but may not have been read yet."""

    def __init__(self, read_rounds: Callable[[], None] | None = None) -> None:
        self.restarts = 0
        self._read_rounds = read_rounds
        self._ranks: dict[int, int] = {}
        self._restarts: dict[int, int] = {}  # by pid
        self._rendezvous_reported = False

    def read(self, line: str) -> Iterator[LogFact]:
        for fact in parse(line):
            if fact.kind is Kind.ELASTIC_RENDEZVOUS and not self._is_news(fact):
                continue
            if self._read_rounds is None and fact.restarts is not None:
                self.restarts = fact.restarts
            pid = fact.data.get("pid", -1)
            if fact.kind is Kind.ELASTIC_WORKER and fact.rank is not None:
                self._note_worker(pid, fact.rank, fact.data["state"])
            yield LogFact(fact.kind, fact.data, self._ranks.get(pid, fact.rank), self._restarts.get(pid, self.restarts))

    def _note_worker(self, pid: int, rank: int, state: str) -> None:
        self._ranks[pid] = rank
        if state == "START" and self._read_rounds is not None:
            self._read_rounds()
        if state == "START" or pid not in self._restarts:
            self._restarts[pid] = self.restarts

    def _is_news(self, fact: LogFact) -> bool:
        """Whether a fact about a rendezvous is new. The end of a rendezvous is reported twice, by the event log and by
        a log line."""
        if not fact.data["done"]:
            self._rendezvous_reported = False
            return True
        if self._read_rounds is not None:
            return False
        news = not self._rendezvous_reported or fact.restarts != self.restarts
        self._rendezvous_reported = True
        return news


OWN_WATCHDOG = "own-watchdog"  # a line that shows, by a pattern in the scenario, that the job notices a hang

_SIGNS = (  # each line with a known failure has one of these, in lower case; looking for them first is 40 times faster
    "error", "fail", "exception", "timed out", "timeout", "terminate", "nvrm", "out of memory", "cuda gpus", "cublas",
    "oom", "watchdog", "heartbeat", "reaping", "of section", "been open", "in use", "eaddrinuse", "by peer",
    "by remote", "broken pipe", "not known", "resolution", "hostname", "no space", "enospc", "quota", "edquot",
    "stale", "read-only", "endpoint", "responding", "too many open", "killed", "bad_alloc", "cancelled", "signal",
    "segfault", "segmentation", "sigsegv", "barrier", "waiting for clients", "completion", "got async",
    "duplicate gpu", "multiple ranks", "shared memory", "no route", "unreachable", "is down", "abort", "refused",
    "unavailable", "cannot connect", "max retries", "fault by gpu", "running low", "low on resource", "shut down",
    "disconnected", "wait timeout", "no socket", "closed", "invalid", "nvidia driver",
)  # fmt: skip
_LONGEST, _MOST = 500, 2000  # characters of a line that are kept, and that are searched


def cause_of(line: str, restarts: int) -> Cause | None:
    """The known failure that a line shows. None if there is none. `restarts`: how often torchrun had restarted the
    workers before the line."""
    line = without_ansi(line[:_MOST]).rstrip()
    lower = line.lower()
    if not any(sign in lower for sign in _SIGNS):
        return None
    fitting = (cause for cause in CAUSES if cause.after_restart in (None, restarts > 0))
    return next((cause for cause in fitting if cause.fits(line)), None)


class CauseReader:
    """Finds known failures in the log of one submission. Reports each cause at most MOST times per attempt, because
    every rank may print it, perhaps in a loop."""

    MOST = 8

    def __init__(self, own: Sequence[str] = ()) -> None:
        """`own`: regular expressions of the scenario, for lines with which the job reports that it noticed a hang."""
        self._own = [re.compile(text) for text in own]
        self._times: dict[tuple[str, int], int] = {}

    def read(self, line: str, restarts: int) -> Iterator[LogFact]:
        cause = cause_of(line, restarts)
        if cause and self._is_due(cause.name, restarts):
            yield LogFact(Kind.LOG_CAUSE, {"cause": cause.name, "line": _short(line), "advice": cause.advice})
        for own in self._own:
            if own.search(line) and self._is_due(f"{OWN_WATCHDOG} {own.pattern}", restarts):
                yield LogFact(Kind.LOG_CAUSE, {"cause": OWN_WATCHDOG, "line": _short(line), "pattern": own.pattern})

    def _is_due(self, name: str, restarts: int) -> bool:
        self._times[name, restarts] = self._times.get((name, restarts), 0) + 1
        return self._times[name, restarts] <= self.MOST


def _short(line: str) -> str:
    return line.strip()[:_LONGEST]


class JobLog:
    """Reads the job's output line by line. `line` is called from the thread that reads the output, and an error here
    must not stop that thread."""

    def __init__(self, journal: Journal, adapter: Adapter | None, watchdogs: Sequence[str] = ()) -> None:
        """`watchdogs`: see CauseReader."""
        self._journal, self._adapter, self._watchdogs = journal, adapter, watchdogs
        self._failed = False
        self.by_round = False  # True for a job on several nodes, see wire.attempt_of
        self.replica: int | None = None  # the number of the replica with this output, if there are several replicas
        self.first_rank = 0  # number of the replica's first rank in the whole job; torchelastic counts from 0
        self.host_pid: Callable[[int], int | None] = int  # turns a pid in the node's output into the host's pid
        self.begin(0)

    def begin(self, attempt_base: int) -> None:
        """Must be called when a new submission starts, because torchelastic then counts its restarts from 0 again."""
        self._base = attempt_base
        rounds = self._journal.catch_up if self.by_round else None
        self._elastic, self._causes = ElasticReader(rounds), CauseReader(self._watchdogs)

    def begin_again(self, attempt_base: int) -> None:
        """Must be called when a torchrun has started. `attempt_base`: the number of its first attempt. If the number is
        new, this is a later torchrun of the same submission, and its attempts are counted from there."""
        if attempt_base != self._base:
            self.begin(attempt_base)

    def in_round(self, number: int) -> None:
        """Sets the current attempt, if another source than the output shows it."""
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
