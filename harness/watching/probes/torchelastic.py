"""Reads the output of torchrun's agent, line by line.

There are two sources, and a version of torch may have either: the event log (a JSON object per event; handler
`console`) and the agent's log lines (restarts only at level INFO). Observed with torch 2.13:

- The event log's `timestamp` is always 0, so lines are stamped on arrival. `worker_id` is the pid.
- An attempt that is retried has no FAILED event, only the line `failed (exitcode: -9) local_rank: 1 (pid: N)`.
- The state of the AGENT is SUCCEEDED even if the job failed, so it is not read.
- The ranks write to the same pipe, so a JSON object may be joined to other text on a line.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchaos.harness.agent.wire import Kind

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
    """Yields all facts about torchelastic in one line of the job's output; most lines have none."""
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
    except (ValueError, KeyError, TypeError, AttributeError):  # torn, or of a version with another format
        return


def _first(details: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = (details.get(key) or [None])[0]
    return {} if value is None else {key: value}


def _signal_name(text: str) -> str:
    return signal.Signals(int(text)).name if text.isdigit() else text


class ElasticReader:
    """Reads the output of one submission. Adds the restart count and the rank of the pid to each fact.

    `read_rounds`: for a job on several nodes. There the agent's own count is not the number of the attempt, so another
    source (agent/rounds.py) sets `restarts` and reports the end of each rendezvous. `read_rounds` reads what that
    source has written: it writes before the workers start, but the output may be read first."""

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
        """Whether a rendezvous fact is new. The end of a rendezvous is reported twice, by the event log and by a log
        line."""
        if not fact.data["done"]:
            self._rendezvous_reported = False
            return True
        if self._read_rounds is not None:
            return False
        news = not self._rendezvous_reported or fact.restarts != self.restarts
        self._rendezvous_reported = True
        return news
