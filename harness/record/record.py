"""Everything that a run left, for assertions and injectors to judge. It is read-only, and opens no file later.

The record of a job of several replicas (each with its own torchrun, as in torchft) can be split into one record for
each replica. In the journal, the ranks of all replicas are numbered one after the other. The record of one replica
looks like the record of an ordinary job: its ranks count from 0, its torchrun is the job's command, and its restarts
are the attempts."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from torchaos.harness.host.processes import uncollected
from torchaos.harness.interfaces import Target, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.events.journal import Gaps, read_journal
from torchaos.harness.record.events.merged import RunEvents
from torchaos.harness.record.history import History
from torchaos.harness.record.plan import After, Plan, PlannedFault, PlannedJob
from torchaos.harness.record.redaction import mask
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.record.steps import Executions

RANK_FAILED = "failed (exitcode: "  # in the line of torchelastic about a failed rank; its traceback follows
_LOG_END = 1 << 18  # bytes; the first error of a job is followed by those of its restarts


@dataclass(frozen=True)
class Record(RunEvents):
    plan: Plan
    events: Sequence[Event]  # merged, in order of time
    artifacts: Mapping[str, Any]  # by file name without .json: "inventory", "environment"
    damaged: tuple[str, ...] = ()  # whole lines of the journal that can't be read
    gaps: tuple[str, ...] = ()  # events that are missing, in words
    log_end: tuple[str, ...] = ()  # the last lines of the job's log, without secrets
    peers: tuple[Executions, ...] = ()  # of one replica's record: the final steps of the others
    program_returns: frozenset[int] = frozenset()  # of the twins, see History
    hit_elsewhere_s: tuple[float, ...] = ()  # of one replica's record: when faults hit the others, CLOCK_MONOTONIC

    @cached_property
    def history(self) -> History:
        return self.history_with(None)

    def history_with(self, twin: History | None) -> History:
        """The history. A twin helps to find its global steps."""
        return History.of(self.events, twin, self.peers, self.hit_elsewhere_s, self.program_returns)

    def beside(self, twins: Sequence[Record]) -> Record:
        """The record for a comparison with twins: if their program puts an older state back at some step, this run does
        it there for the same reason, and not because of a fault."""
        if self.plan.job.replicas > 1 or not any(part.after for part in self.history.segments):
            return self
        of_twins = frozenset().union(*(twin.history.program_returns for twin in twins))
        return replace(self, program_returns=of_twins) if of_twins - self.program_returns else self

    @cached_property
    def of_replicas(self) -> Sequence[Record]:
        """The record of each replica; for a job without replicas, the run itself."""
        job = self.plan.job
        if job.replicas == 1:
            return (self,)
        return _with_peers([_record_of(self, replica) for replica in range(job.replicas)])

    @cached_property
    def of_ranks(self) -> Mapping[int, Record]:
        """The record of each rank, as if the rank were a job: for a job whose ranks make different numbers of steps,
        where a step number means something only on one rank."""
        ranks = sorted({rank for attempt in self.history.attempts for rank in attempt.ranks})
        events: dict[int, list[Event]] = {rank: [] for rank in ranks}
        for event in self.events:
            whole = event.rank not in events or "fault" in event.data  # a fault in one rank interrupts them all
            for rank in ranks if whole else (event.rank,):
                if rank is not None:
                    events[rank].append(event)
        return {rank: replace(self, events=tuple(own)) for rank, own in events.items()}

    @cached_property
    def exited(self) -> Event | None:
        """The event that the job's last command exited. None if this was not seen."""
        return next((event for event in reversed(self.beside_steps) if event.kind is Kind.JOB_EXITED), None)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the job's last command. None: not seen."""
        return self.exited.data["exit_code"] if self.exited else None

    @cached_property
    def stopped(self) -> Event | None:
        """The event that says why torchaos ended the run before the job ended. None if there is none. The job may still
        have saved, and may have ended with exit code 0."""
        return next(self.of_kind(Kind.STOPPED), None)

    @property
    def ended_on_purpose(self) -> bool:
        """Whether the scenario ended the run on purpose (`until`)."""
        return any(event.data.get("enough") for event in self.of_kind(Kind.STOPPED))

    @classmethod
    @uncollected()
    def load(cls, folder: RunDir) -> Record:
        """Reads a run directory. Raises UsageError if a needed file is missing or damaged."""
        try:
            artifacts = {path.stem: json.loads(path.read_text()) for path in sorted(folder.artifacts.glob("*.json"))}
            damaged, gaps = list[str](), Gaps()
            events = read_journal(folder.events, damaged, gaps)
            plan, missing = Plan.read(folder.plan), tuple(gaps.in_words())
            return cls(plan, events, artifacts, tuple(damaged), missing, _log_end(folder))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{folder.root}: it can't be judged, a file is missing or damaged: {error}") from error


def _log_end(folder: RunDir) -> tuple[str, ...]:
    """The last lines of the logs of the last submission; empty if there are none. With a log for each node: for each
    failure of an attempt, counted from the end, the lines of all nodes up to the failure, and then the lines after the
    last."""
    submissions = defaultdict[int, list[Path]](list)
    for path in sorted(folder.logs.glob("job-*.log"), key=lambda path: (len(path.name), path.name)):
        if (number := path.name[len("job-") :].partition(".")[0]).isdecimal():
            submissions[int(number)].append(path)
    parts = [_up_to_failures(path) for path in submissions[max(submissions, default=0)]]
    most = max(map(len, parts), default=0)
    return tuple(line for back in range(most, 0, -1) for own in parts if back <= len(own) for line in own[-back])


def _up_to_failures(log: Path) -> list[list[str]]:
    """The last lines of a log in parts: one up to each failure of a rank that torchelastic reports, and one after the
    last."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_END))
        lines = mask(file.read(_LOG_END).decode(errors="replace")).splitlines()
    ends = [place + 1 for place, line in enumerate(lines) if RANK_FAILED in line]
    return [lines[start:end] for start, end in pairwise([0, *ends, len(lines)])]


_COMMAND = {Kind.NODE_STARTED: Kind.JOB_STARTED, Kind.NODE_EXITED: Kind.JOB_EXITED}


def ranks_of(job: PlannedJob, replica: int) -> range:
    """The ranks of a replica, by their numbers in the whole job."""
    size = job.world_size // job.replicas
    return range(replica * size, (replica + 1) * size)


def events_of(events: Iterable[Event], job: PlannedJob, replica: int) -> Iterator[Event]:
    """The events of one replica, and the events that belong to no replica."""
    ranks = ranks_of(job, replica)
    for event in events:
        if event.rank is not None:
            if event.rank in ranks:
                yield replace(event, rank=event.rank - ranks.start)
        elif event.kind in _COMMAND:
            if event.data["node"] == replica:
                yield replace(event, kind=_COMMAND[event.kind])
        elif event.kind not in _COMMAND.values() and event.data.get("replica", replica) == replica:
            yield event


def _with_peers(parts: list[Record]) -> list[Record]:
    """The records of replicas. Each has, as `peers`, the steps of the replicas that began before it; of all other
    replicas, if these are needed to give its steps global numbers."""
    begun = {number: part.history.executions.first_s() or inf for number, part in enumerate(parts)}
    done: dict[int, Executions] = {}
    for number in sorted(begun, key=begun.__getitem__):
        parts[number] = replace(parts[number], peers=tuple(done.values()))
        done[number] = parts[number].history.by_step().executions
    return [
        replace(part, peers=tuple(steps for other, steps in done.items() if other != number))
        if part.history.unplaced else part
        for number, part in enumerate(parts)
    ]  # fmt: skip


def without_steps(run: Record) -> Record:
    """The record without steps, samples and checkpoints, for pages that would show those of all replicas as if they
    came from one torchrun."""
    of_steps = {
        Kind.STEP, Kind.LOSS, Kind.LOG_STEP, Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.KEPT, Kind.BEGUN, Kind.RENAMED,
        Kind.REMOVED, Kind.LOAD_BEGIN, Kind.LOAD_END,
    }  # fmt: skip
    return replace(run, events=tuple(event for event in run.beside_steps if event.kind not in of_steps))


def _record_of(run: Record, replica: int) -> Record:
    plan = _plan_of(run.plan, replica)
    others = {fault.id for fault in run.plan.faults} - {fault.id for fault in plan.faults}
    events = events_of(run.events, run.plan.job, replica)
    own = tuple(event for event in events if event.data.get("fault") not in others)
    hits = run.of_kind(Kind.APPLYING, Kind.APPLIED)
    elsewhere = tuple(event.mono_s for event in hits if event.data.get("fault") in others)
    return replace(run, plan=plan, events=own, hit_elsewhere_s=elsewhere)


def _plan_of(plan: Plan, replica: int) -> Plan:
    ranks = ranks_of(plan.job, replica)
    job = replace(plan.job, world_size=len(ranks), nodes=1, replicas=1)
    return replace(plan, job=job, faults=tuple(_faults_of(plan.faults, ranks, replica)))


def _faults_of(faults: Iterable[PlannedFault], ranks: range, replica: int) -> Iterator[PlannedFault]:
    for fault in faults:
        whole = fault.target
        own = Target(
            tuple(rank - ranks.start for rank in whole.ranks if rank in ranks), (0,) if replica in whole.nodes else ()
        )
        if own.ranks or own.nodes or not (whole.ranks or whole.nodes):  # a fault in files hits all replicas
            yield replace(fault, target=own, trigger=_trigger_of(fault, ranks))


def _trigger_of(fault: PlannedFault, ranks: range) -> Moment | After:
    when = fault.trigger
    return replace(when, pacer=max(0, when.pacer - ranks.start)) if isinstance(when, Moment) else when
