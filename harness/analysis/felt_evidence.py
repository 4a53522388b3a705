"""Evidence that processes died, were stopped, made no step, or kept others waiting. Injectors use it to prove that
their fault was felt.

A report of the target's own agent is never proof by itself: the kernel, torchelastic or the other ranks must agree.
That a rank kept others waiting is shown by the other ranks. Each has its own agent, which knows nothing of the fault,
and in synchronous training no rank can finish a step while another rank is missing in a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np

from torchaos.harness.analysis.ending import ABORT, aborts_at_exit
from torchaos.harness.interfaces import Evidence
from torchaos.harness.protocol.wire import Event, Kind, Phase
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Executions

_EXITS = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE, Kind.JOB_EXITED)


def died(record: Record, fault: str, *codes: int) -> Evidence | None:
    """Evidence that every process that the fault hit ended with one of these exit codes (-9: killed by signal 9). None
    if not all of them did."""
    proofs = of_each(record, fault, lambda hit: _death(record, hit, codes))
    words = "; ".join(f"pid {proof.data['pid']} ended with {_words(proof)}" for proof in proofs)
    return Evidence.of(words, *proofs) if proofs else None


def broke_off(record: Record, fault: str) -> Evidence | None:
    """Evidence that the job caught an exception and could not go on as before. After each landing, and before a further
    step of the rank that was hit, one of these happened: the job loaded a checkpoint again and went on from there; the
    rank ended with exit code 0 in the middle of a step, or with more steps to make; the log showed a known error after
    no rank had ended a step for a long time; or the ranks began the step anew. The agents of the other ranks, or the
    kernel, saw it, too."""
    found = [_break(record, hit) for hit in record.of_fault(fault, Kind.APPLYING)]
    proofs = [proof for proof in found if proof is not None]
    if not proofs or len(proofs) < len(found):
        return None
    return Evidence.of("; ".join(words for words, _event in proofs), *(event for _words, event in proofs))


_LONG = (1.0, 10.0)  # seconds, usual steps
_WITHIN = (Phase.BACKWARD, Phase.OPTIMIZER)  # the job has got so far into the step that it wants to end it


def _break(record: Record, hit: Event) -> tuple[str, Event] | None:
    """What the job did between a hit and the next step of the rank that was hit, and the event that shows it."""
    history, steps = record.history, record.steps_made.of_attempt(hit.attempt)
    own = steps.at((steps.rank == hit.rank) & (steps.mono_s > hit.mono_s))
    next_s = float(own.mono_s.min(initial=inf))
    loads = [e for e in record.of_kind(Kind.LOAD_END) if e.attempt == hit.attempt and hit.mono_s < e.mono_s < next_s]
    back = next(
        (part for part in history.put_back(hit.attempt or 0, hit.mono_s, next_s) if part.base is not None), None
    )
    reached = history.highest_step(before_s=hit.mono_s)
    begun = record.of_kind(Kind.BEGUN) if back and back.in_memory else ()
    loads += [e for e in begun if e.attempt == hit.attempt and hit.mono_s < e.mono_s < next_s]
    if back and loads and back.base is not None and reached is not None and back.base <= reached:
        did = "put back a state that it had kept in memory" if back.in_memory else "loaded a checkpoint again"
        return f"the job {did}, and went on from step {back.base} after step {reached}", loads[0]
    if (end := _ended_quietly(record, hit)) and (unfinished := _unfinished(record, hit)):
        return f"{_what_broke(end)} {unfinished}", end
    for told in record.of_kind(Kind.LOG_CAUSE):
        if told.attempt == hit.attempt and hit.mono_s < told.mono_s < next_s:
            until = steps.mono_s[steps.mono_s <= told.mono_s]
            waited_s = told.mono_s - max(hit.mono_s, float(until.max(initial=0.0)))
            if waited_s >= max(_LONG[0], _LONG[1] * _usual(steps, hit.mono_s)):
                return f"no rank ended a step for {waited_s:.2f} s, and then the log showed {told.data['cause']}", told
    return _made_anew(record, hit)


def _made_anew(record: Record, hit: Event) -> tuple[str, Event] | None:
    """How another rank began the step anew in which the fault hit: it cleared its gradients without an update, or made
    more backwards, more often than in any step before. None if none did."""
    peers, done = _peers(record, hit), hit.step or 0
    due = peers.at(peers.local_step == done + 1)
    for place, one in enumerate(due):
        before = [*peers.at((peers.rank == one.rank) & (peers.local_step <= done))]
        dropped, backwards = max((was.dropped for was in before), default=inf), [len(was.losses) for was in before]
        step = done + 1 if one.global_step is None else one.global_step
        if one.dropped > dropped:
            return f"rank {one.rank} cleared its gradients without an update in step {step}", due.event(place)
        if len(one.losses) > max(backwards, default=0) > 0:
            many = f"{counted(len(one.losses), 'backward')} in step {step}"
            return f"rank {one.rank} made {many}, and at most {max(backwards)} in each step before", due.event(place)
    return None


def ended_before_twin(record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
    """Evidence that every rank that the fault hit ended with exit code 0 and did not make its next step. In the first
    twin, the same rank made that step."""
    hits, ends = list(record.of_fault(fault, Kind.APPLYING)), of_each(record, fault, partial(_ended_quietly, record))
    steps = [_not_made(record, hit, twins[0].history.executions) for hit in hits]
    if not ends or "" in steps:
        return None
    return Evidence.of(
        "; ".join(f"{_what_broke(end)} {step} in the twin" for end, step in zip(ends, steps, strict=True)), *ends
    )


def _ended_quietly(record: Record, hit: Event) -> Event | None:
    """The event of a process that ended with exit code 0 and made no step after the hit."""
    end = _after(record.of_kind(*_EXITS), hit)
    later = record.steps_made.of_source(hit.source).mono_s > hit.mono_s
    return end if end and end.data.get("exit_code") == 0 and not later.any() else None


def _unfinished(record: Record, hit: Event) -> str:
    """Why it is known that a rank that has ended had more to do, as the end of a sentence. Empty if it is not known: a
    rank also asks for a batch when there is none left, and a model is also evaluated."""
    if hit.data["phase"] in _WITHIN:
        return f"in the middle of a step ({hit.data['phase']})"
    if (failed := _broke(record, hit)) is not None:
        return f"and then {_what_broke(failed)}"
    if made := _not_made(record, hit, record.history.executions.after(hit.mono_s)):
        return f"{made} in a later attempt"
    told = [e for e in record.of_kind(Kind.LOG_CAUSE) if e.mono_s > hit.mono_s and e.data["cause"] == "peer-gone"]
    later = record.steps_made.of_attempt(hit.attempt).mono_s > hit.mono_s
    waited = told and told[0].attempt == hit.attempt and not later.any()
    return (
        "and, with no step after the fault, the log shows that a rank lost its connection to another" if waited else ""
    )


def _not_made(record: Record, hit: Event, steps: Executions) -> str:
    """If the rank that was hit has made its next step there: words that say so."""
    done = record.history.steps_done(hit.rank, hit.attempt, hit.mono_s)
    if done is None or not ((steps.rank == hit.rank) & (steps.global_step == done + 1)).any():
        return ""
    return f"before step {done + 1}, which rank {hit.rank} made"


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
    """The first of these events after the hit that is about the process that was hit."""
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
    """Evidence that all ranks waited for the target. Each time the fault hit, there was a time of at least 0.8 of
    `seconds`, before the target's next step ended, in which no rank finished a step. (The other ranks may first finish
    the step that they are in.)"""
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


_SHARE = 0.8  # of the time that the fault was on, because the other ranks first finish their present step
_ENDS = (Kind.ROLLED_BACK, Kind.RANK_EXITED, Kind.JOB_EXITED, Kind.STOPPED)


def all_waited(record: Record, fault: str) -> Evidence | None:
    """Evidence that after each landing, no other rank finished a step for most of the time that the fault was on. This
    time must be at least two usual steps.

    The fault is on until its rollback, the end of the target or the end of the run. In an attempt in which the other
    ranks made no step, the evidence is that one of them failed while the fault was on."""
    hits = list(record.of_fault(fault, Kind.APPLYING))
    found = [_wait(record, hit) for hit in hits]
    if not found or None in found:
        return None
    words = ", ".join(f"{seconds:.2f}" for seconds, _ in filter(None, found))
    ends = [end for _, end in filter(None, found)]
    failed = "".join(f", and then rank {end.rank} left" for end in ends if end.kind is Kind.AGENT_ENDED)
    seen = [event for hit, end in zip(hits, ends, strict=True) for event in _named_by_nccl(record, hit, end)]
    said = f"; NCCL's RAS: {seen[0].data['detail']}" if seen else ""
    return Evidence.of(f"no other rank ended a step for {words} s{failed}{said}", *ends, *seen[:1])


def _named_by_nccl(record: Record, hit: Event, end: Event) -> list[Event]:
    """The reports of NCCL's own health service, between the hit and its end, that name the rank that was hit."""
    return [
        event for event in record.of_kind(Kind.HANG_OPINION)
        if event.data["observer"] == "nccl-ras" and hit.rank in event.data.get("ranks", ())
        and hit.mono_s < event.mono_s <= end.mono_s
    ]  # fmt: skip


def slower(record: Record, fault: str, by_s: float = 0.0, factor: float = 1.4) -> Evidence | None:
    """Evidence that the other ranks' steps took longer while the fault was on than before and after it. The longest
    step must take at least 0.8 * `by_s` seconds more than usual, and the mean must grow by at least (factor - 1) / 2 of
    a usual step. A usual step is the median of the steps before and after the fault, because the load of the machine
    may change with the time. None if a bound is not reached, or if there are too few steps to judge."""
    found = [_slower(record, hit, by_s, factor) for hit in record.of_fault(fault, Kind.APPLYING)]
    if not found or None in found:
        return None
    words = ", ".join(
        f"{usual:.3f} s without the fault and {during:.3f} s during it" for usual, during, _ in filter(None, found)
    )
    return Evidence.of(f"a step of the other ranks took {words}", *(last for _, _, last in filter(None, found)))


def took_turns(record: Record, fault: str) -> Evidence | None:
    """Evidence that, while the fault was on, each process that it hit was seen stopped and then running again at least
    three times."""
    events: list[Event] = []
    for hit in record.of_fault(fault, Kind.APPLYING):
        end = _end(record, hit)
        until_s = end.mono_s if end is not None else inf
        seen = [e for e in record.of_kind(Kind.RANK_STATE) if e.data["pid"] == hit.data["pid"]]
        turns = [a for a, b in pairwise(seen) if a.data["state"] == "T" != b.data["state"]]
        during = [event for event in turns if hit.mono_s < event.mono_s < until_s]
        if len(during) < 3:
            return None
        events += during
    return _turns(events) if events else None


def _turns(events: list[Event]) -> Evidence:
    pids = ", ".join(sorted({str(event.data["pid"]) for event in events}))
    words = f"the kernel showed pid {pids} as stopped {counted(len(events), 'time')}, and going on in between"
    return Evidence.of(words, *events)


def out_of_step(record: Record, fault: str) -> Evidence | None:
    """Evidence that the ranks no longer worked together: after each landing, a rank failed in the same attempt, or no
    rank finished a step until the run was stopped."""
    proofs = of_each(record, fault, partial(_broke, record))
    return Evidence.of("; ".join(f"then {_what_broke(proof)}" for proof in proofs), *proofs) if proofs else None


def _broke(record: Record, hit: Event) -> Event | None:
    """The first failure of a rank in the attempt after a hit, or the stop of a run that no longer made steps."""
    fine = {0, None}
    if hit.attempt in {abort.attempt for abort in aborts_at_exit(record)}:
        fine.add(ABORT)  # an abort at interpreter exit, when the work was done
    for event in record.beside_steps:
        if event.mono_s <= hit.mono_s:
            continue
        failed = event.kind in (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE) and event.data["exit_code"] not in fine
        if failed and event.attempt in (None, hit.attempt):
            return event
        if event.kind is Kind.STOPPED and not event.data.get("interrupted"):
            steps = record.steps_made.mono_s
            steps, own = steps[steps <= event.mono_s], record.steps_made.of_attempt(hit.attempt)
            waited_s = event.mono_s - float(steps.max()) if len(steps) else 0.0
            return event if waited_s > 10 * max(_usual(own, hit.mono_s), 0.1) else None
    return None


def _what_broke(event: Event) -> str:
    if event.kind is Kind.STOPPED:
        return "no rank ended another step"
    return f"pid {event.data['pid']} ended with exit code {event.data['exit_code']}"


def _slower(record: Record, hit: Event, by_s: float, factor: float) -> tuple[float, float, Event] | None:
    end = _end(record, hit)
    peers = _peers(record, hit)
    until_s = end.mono_s if end is not None else inf
    usual = _usual(peers, hit.mono_s, until_s)
    during = peers.at((peers.rank == peers.rank[:1]) & (hit.mono_s < peers.mono_s) & (peers.mono_s <= until_s))
    gaps: list[float] = np.diff(during.mono_s).tolist()
    if not usual or not gaps:
        return None
    mean = sum(gaps) / len(gaps)
    enough = max(gaps) >= usual + 0.8 * by_s and mean >= usual * (1 + (factor - 1) / 2)
    return (usual, mean, during.event(-1)) if enough else None


def _peers(record: Record, hit: Event) -> Executions:
    """The steps of the other ranks in the attempt that was hit, in order of time."""
    own = record.steps_made.of_attempt(hit.attempt)
    return own.at(own.rank != hit.rank)


def _wait(record: Record, hit: Event) -> tuple[float, Event] | None:
    """The longest time, in seconds, in which no other rank finished a step while the fault was on, and the event that
    ended this time. None if it was too short to prove anything."""
    end = _end(record, hit)
    peers = _peers(record, hit)
    if end is None:
        return None
    if not len(peers):
        return _gave_up(record, hit, end)
    later, over_s = peers.after(hit.mono_s), end.mono_s
    inside = int((later.mono_s <= end.mono_s).sum())
    if end.kind is Kind.ROLLED_BACK and inside < len(later):
        end = later.event(inside)
    silences = np.diff(later.mono_s[:inside], prepend=hit.mono_s, append=end.mono_s)
    longest = int(silences.argmax())
    silence, last = float(silences[longest]), later.event(longest) if longest < inside else end
    usual = _usual(peers, hit.mono_s)
    enough = silence >= _SHARE * (over_s - hit.mono_s) and silence >= 2 * usual
    return (silence, last) if enough else None


def _gave_up(record: Record, hit: Event, end: Event) -> tuple[float, Event] | None:
    """The first failure of a rank that was not hit: seconds since the hit, and the event of the failure. The rank must
    have failed while the fault was on, and not because torchelastic ended it."""
    torn_down = {event.data["pid"] for event in record.of_kind(Kind.ELASTIC_TEARDOWN)}
    failed = {
        event.rank: event for event in record.of_kind(Kind.RANK_EXITED)
        if event.attempt == hit.attempt and event.rank != hit.rank
        and event.data["exit_code"] not in (0, None) and event.data["pid"] not in torn_down
    }  # fmt: skip
    # The interpreter takes seconds to end after the agent's last event.
    last_words = (e for e in record.of_kind(Kind.AGENT_ENDED) if e.attempt == hit.attempt and e.rank in failed)
    left = (event for event in (*last_words, *failed.values()) if hit.mono_s < event.mono_s <= end.mono_s)
    first = min(left, key=lambda event: event.mono_s, default=None)
    return None if first is None else (first.mono_s - hit.mono_s, first)


def _end(record: Record, hit: Event) -> Event | None:
    """The event that ended the fault that made this hit."""
    return next((event for event in record.of_kind(*_ENDS) if event.mono_s > hit.mono_s and _ends(event, hit)), None)


def _ends(event: Event, hit: Event) -> bool:
    if event.kind is Kind.ROLLED_BACK:
        return bool(event.data["fault"] == hit.data["fault"])
    return event.kind is not Kind.RANK_EXITED or event.data["pid"] == hit.data["pid"]


def _usual(peers: Executions, before_s: float, after_s: float = inf) -> float:
    """The median seconds between two steps of a rank, over the steps up to `before_s` and from `after_s` on. 0 if there
    are fewer than three such times."""
    steps = peers.at(np.argsort(peers.rank, kind="stable"))
    over_s = steps.mono_s
    wanted = (np.diff(steps.rank) == 0) & ((over_s[1:] <= before_s) | (over_s[:-1] >= after_s))
    gaps = np.diff(over_s)[wanted]
    return float(np.median(gaps)) if len(gaps) >= 3 else 0.0
