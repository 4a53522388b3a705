"""Evidence that processes died, were stopped, or made no step. Injectors use it to prove that their fault was felt. A
report of the target's own agent is never proof by itself: the kernel, torchelastic or the other ranks must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import Evidence
from torchaos.harness.record.record import Record

_EXITS = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE, Kind.JOB_EXITED)


def died(record: Record, fault: str, *codes: int) -> Evidence | None:
    """Evidence that every process that the fault hit ended with one of these exit codes (-9: killed by signal 9). None
    if not all of them did."""
    proofs = of_each(record, fault, lambda hit: _death(record, hit, codes))
    words = "; ".join(f"pid {proof.data['pid']} ended with {_words(proof)}" for proof in proofs)
    return Evidence.of(words, *proofs) if proofs else None


def gone(record: Record, fault: str) -> Evidence | None:
    """Evidence that every process that the fault hit ended. Any exit code counts, because a job that ends gracefully
    chooses its own."""
    exits = of_each(record, fault, lambda hit: _after(record.of_kind(*_EXITS), hit))
    return Evidence.of(f"pid {_pids(exits)} left", *exits) if exits else None


def stopped(record: Record, fault: str) -> Evidence | None:
    """Evidence that the process probe saw every process that the fault hit in state T (stopped) after the hit."""
    states = [event for event in record.of_kind(Kind.RANK_STATE) if event.data["state"] == "T"]
    seen = of_each(record, fault, lambda hit: _after(states, hit))
    return Evidence.of(f"the kernel showed pid {_pids(seen)} as stopped", *seen) if seen else None


def of_each(record: Record, fault: str, find: Callable[[Event], Event | None]) -> list[Event]:
    """The results of `find` for each hit of the fault. Empty if one of them is None, or if there was no hit."""
    found = [find(hit) for hit in record.of_fault(fault, Kind.APPLYING)]
    return [] if None in found else [event for event in found if event]


def _after(events: Iterable[Event], hit: Event) -> Event | None:
    """The first of these events that came after the hit and is about the process that was hit."""
    return next((e for e in events if e.data.get("pid") == hit.data["pid"] and e.mono_s >= hit.mono_s), None)


def _death(record: Record, hit: Event, codes: tuple[int, ...]) -> Event | None:
    """The end of the process that was hit, with one of these exit codes. None also if the rank finished a step after
    the hit, because then it survived the fault and died for another reason."""
    death = _after((event for event in record.of_kind(*_EXITS) if event.data.get("exit_code") in codes), hit)
    steps = record.steps_made.of_source(hit.source).mono_s
    survived = death is not None and ((hit.mono_s < steps) & (steps < death.mono_s)).any()
    return None if survived else death


def _words(proof: Event) -> str:
    witness = "torchelastic says" if proof.kind is Kind.ELASTIC_FAILURE else "the kernel says"
    return f"exit code {proof.data['exit_code']}, {witness}"


def _pids(events: Iterable[Event]) -> str:
    return ", ".join(str(event.data["pid"]) for event in events)


def stood_still(record: Record, fault: str, seconds: float) -> Evidence | None:
    """Evidence that all ranks waited for the target. At each landing, no rank finished a step for at least 0.8 of
    `seconds` before the target finished its next step. The other ranks may first finish the step that they are in."""
    found = [_silence(record, hit) for hit in record.of_fault(fault, Kind.APPLYING)]
    if not found or min(gap for gap, _end in found) < 0.8 * seconds:
        return None
    gaps = ", ".join(f"{gap:.2f}" for gap, _end in found)
    return Evidence.of(f"no rank finished a step for {gaps} s", *(end for _gap, end in found if end))


def _silence(record: Record, hit: Event) -> tuple[float, Event | None]:
    """The longest time, in seconds, in which no rank finished a step, between a hit and the next step of the rank that
    was hit; and the step that ended this time."""
    later = record.steps_made.in_order_of_time.after(hit.mono_s)
    own = later.at((later.rank == hit.rank) & (later.attempt == hit.attempt))
    if not len(own):
        return 0.0, None
    ends = later.at(later.mono_s <= own.mono_s[0])
    silences = np.diff(ends.mono_s, prepend=hit.mono_s)
    return float(silences.max()), ends.event(int(silences.argmax()))
