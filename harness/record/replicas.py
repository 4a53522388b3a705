"""Splits the record of a job of several replicas, each with its own torchrun, as in torchft. Pure.

In the journal, the ranks of all replicas are numbered one after the other. The record of one replica looks like the
record of an ordinary job: its ranks count from 0, its torchrun is the job's command, and its restarts are the
attempts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torchaos.harness.agent.plan import Moment
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import Target
from torchaos.harness.record.plan import After, Plan, PlannedFault, PlannedJob
from torchaos.harness.record.record import Record

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


def records_of(run: Record) -> list[Record]:
    """The record of each replica; for a job without replicas, the run itself."""
    job = run.plan.job
    return [run] if job.replicas == 1 else [_record_of(run, replica) for replica in range(job.replicas)]


def without_steps(run: Record) -> Record:
    """The record without steps, samples and checkpoints, for pages that would show those of all replicas as if they
    came from one torchrun."""
    of_steps = {
        Kind.STEP, Kind.LOSS, Kind.LOG_STEP, Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.KEPT, Kind.BEGUN, Kind.RENAMED,
        Kind.LOAD_BEGIN, Kind.LOAD_END,
    }  # fmt: skip
    return replace(run, events=tuple(event for event in run.beside_steps if event.kind not in of_steps))


def _record_of(run: Record, replica: int) -> Record:
    plan = _plan_of(run.plan, replica)
    others = {fault.id for fault in run.plan.faults} - {fault.id for fault in plan.faults}
    events = events_of(run.events, run.plan.job, replica)
    return replace(run, plan=plan, events=tuple(event for event in events if event.data.get("fault") not in others))


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
