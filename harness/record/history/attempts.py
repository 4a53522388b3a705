"""The attempts of a run: the process of each rank, its times, and how each attempt ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history.evidence import Witness
from torchaos.harness.record.history.segments import Segment

_BORN = (Kind.RANK_UP, Kind.AGENT_STARTED, Kind.STEP, Kind.ELASTIC_WORKER)


@dataclass(frozen=True)
class Process:
    """The process that was a rank in one attempt. (pid, start_ticks) identifies it for ever."""

    pid: int | None
    start_ticks: int | None
    up_s: float  # first seen, CLOCK_MONOTONIC
    exited_s: float | None = None
    exit_code: int | None = None  # negative: signal; None: unknown, or still running


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks, until they have ended."""

    number: int
    submission: int
    ranks: Mapping[int, Process]
    started_s: float
    ended_s: float | None  # when the last of its ranks was gone
    world_size: int
    base: int | None = None  # global steps done before its first step; None: not known
    witnesses: tuple[Witness, ...] = ()
    conflicts: tuple[str, ...] = ()  # witnesses that disagree: evidence that some state was not restored
    loaded: str | None = None  # path of the checkpoint that it resumed from
    first_step: int | None = None  # global
    last_step: int | None = None
    segments: tuple[Segment, ...] = ()  # base, conflicts and loaded are those of the first segment

    @property
    def exit_codes(self) -> dict[int, int | None]:
        return {rank: process.exit_code for rank, process in self.ranks.items()}


def read(events: Sequence[Event]) -> list[Attempt]:
    """The attempts in order of number. Their `base` (the global step from which an attempt resumed) is not known yet.
    The events must be in order of time."""
    of_attempt: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.attempt is not None and event.kind in _BORN and event.rank is not None:
            of_attempt[event.attempt].append(event)
    starts = [(event.mono_s, int(event.data["submission"])) for event in events if event.kind is Kind.JOB_STARTED]
    if not of_attempt:  # only the job's own start and its log are known
        return [Attempt(n, submission, {}, start, None, 0) for n, (start, submission) in enumerate(starts)]
    exits = _Exits(event for event in events if event.kind in (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE))
    return [_attempt(number, of_attempt[number], exits, starts) for number in sorted(of_attempt)]


def _attempt(number: int, seen: list[Event], exits: _Exits, starts: list[tuple[float, int]]) -> Attempt:
    started = min(event.mono_s for event in seen)
    of_rank: dict[int, list[Event]] = defaultdict(list)
    for event in seen:
        if event.rank is not None:
            of_rank[event.rank].append(event)
    ranks = {rank: _process(number, rank, of_rank[rank], exits) for rank in sorted(of_rank)}
    sizes = [event.data["world_size"] for event in seen if event.data.get("world_size")]
    ends = [process.exited_s for process in ranks.values()]
    ended = max((end for end in ends if end is not None), default=None) if None not in ends else None
    submission = max(((start, n) for start, n in starts if start <= started), default=(0.0, 0))[1]
    return Attempt(number, submission, ranks, started, ended, sizes[-1] if sizes else len(ranks))


def _process(attempt: int, rank: int, seen: list[Event], exits: _Exits) -> Process:
    # Torchelastic names the process that it started, which may be a shell around the trainer.
    named = sorted(seen, key=lambda event: event.kind is Kind.ELASTIC_WORKER)
    pid = next((event.data["pid"] for event in named if event.data.get("pid")), None)
    ticks = next((event.data["start_ticks"] for event in seen if event.data.get("start_ticks")), None)
    own = [event for event in exits.perhaps_of(attempt, rank, pid) if _is_of(event, attempt, rank, pid, ticks)]
    gone = next((event for event in own if event.kind is Kind.RANK_EXITED), None)
    codes = [event.data.get("exit_code") for event in own]
    code = next((code for code in codes if code is not None), None)
    return Process(pid, ticks, seen[0].mono_s, gone.mono_s if gone else None, code)


class _Exits:
    """The ends of processes, with searches by rank and by pid."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_pid: dict[int | None, list[tuple[int, Event]]] = defaultdict(list)
        self._by_rank: dict[tuple[int | None, int | None], list[tuple[int, Event]]] = defaultdict(list)
        for place, event in enumerate(events):
            self._by_pid[event.data.get("pid")].append((place, event))
            self._by_rank[event.attempt, event.rank].append((place, event))

    def perhaps_of(self, attempt: int, rank: int, pid: int | None) -> list[Event]:
        """The ends that may belong to this process, the most likely first."""
        found = dict([*self._by_pid[pid], *self._by_rank[attempt, rank]])
        return [found[place] for place in sorted(found)]


def _is_of(event: Event, attempt: int, rank: int, pid: int | None, ticks: int | None) -> bool:
    if event.data.get("pid") is not None and pid is not None:
        other = event.data.get("start_ticks")
        return bool(event.data["pid"] == pid and (other is None or ticks is None or other == ticks))
    return event.attempt == attempt and event.rank == rank
