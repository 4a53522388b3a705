"""How long each part of the recovery from each fault took. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchaos.harness import registry
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.history import Attempt, Execution, History
from torchaos.harness.record import Record
from torchaos.harness.result import Recovery

# In the order in which they happen; seconds since the fault was applied.
PARTS = ("felt", "detected", "torn_down", "rendezvous", "workers_up", "restored", "first_step", "caught_up")

_DETECTED = (Kind.ELASTIC_FAILURE, Kind.ELASTIC_TEARDOWN, Kind.JOB_EXITED)


@dataclass(frozen=True)
class Landing:
    """One fault as it hit: all its targets at once."""

    fault: str
    at_s: float  # CLOCK_MONOTONIC
    attempt: int
    ranks: frozenset[int]  # empty: not a rank but a node, or the job itself
    pids: frozenset[int]


def recoveries(record: Record) -> list[Recovery]:
    """One per fault that landed, and per attempt that it landed in, in order of time."""
    return [recovery_from(record, landing) for landing in landings(record)]


def landings(record: Record) -> list[Landing]:
    hits: dict[tuple[str, int], list[Event]] = {}
    applying = {event.data["fault"] for event in record.of_kind(Kind.APPLYING)}
    for event in record.of_kind(Kind.APPLYING, Kind.APPLIED):
        if event.kind is Kind.APPLIED and event.data["fault"] in applying:
            continue
        alive = record.history.attempt_at(event.mono_s)
        attempt = event.attempt if event.attempt is not None else alive.number if alive else 0
        hits.setdefault((event.data["fault"], attempt), []).append(event)
    found = [_landing(fault, attempt, events) for (fault, attempt), events in hits.items()]
    return sorted(found, key=lambda landing: landing.at_s)


def _landing(fault: str, attempt: int, events: Sequence[Event]) -> Landing:
    ranks = frozenset(event.rank for event in events if event.rank is not None)
    pids = frozenset(event.data["pid"] for event in events if event.data.get("pid"))
    return Landing(fault, min(event.mono_s for event in events), attempt, ranks, pids)


def recovery_from(record: Record, landing: Landing) -> Recovery:
    history, after = record.history, _After(record.events, landing.at_s)
    effect = after.first(lambda e: e.kind is Kind.EFFECT and e.data["fault"] == landing.fault)
    felt = _earliest(after.first(lambda e: _is_end_of(e, landing)), effect)
    stepped = first_within(record, landing)
    if stepped is not None:  # so an end that comes after that is of another cause
        felt = felt if felt is not None and felt <= stepped.mono_s else effect
        return _recovery(landing, {"felt": felt, "caught_up": stepped.mono_s}, 0)
    before = next((one for one in history.attempts if one.number == landing.attempt), None)
    reached = highest_up_to(history, landing.attempt)
    later = [one for one in history.attempts if one.number > landing.attempt]
    until_s = later[0].started_s if later else float("inf")
    detected = after.first(lambda e: e.kind in _DETECTED and e.mono_s <= until_s)
    seen = {"felt": felt, "detected": detected, "torn_down": _end_after(before, landing.at_s)}
    made_steps = {one.attempt for one in history.executions}
    came_back = next((one for one in later if one.number in made_steps), later[0] if later else None)
    if came_back is None:
        return _recovery(landing, seen, None)
    past = [one.mono_s for one in history.executions if (one.global_step or 0) > (reached or 0)]
    seen.update(_parts_of(came_back, history, after))
    seen["caught_up"] = min(past, default=None)
    return _recovery(landing, seen, _lost(history, landing.attempt, reached))


def _parts_of(back: Attempt, history: History, after: _After) -> dict[str, float | None]:
    """The parts of the attempt that made steps again, from its rendezvous to its first step."""
    first = min((one.mono_s for one in history.executions if one.attempt == back.number), default=None)
    loads = [load.mono_s for load in history.loads if load.attempt == back.number and load.ok]
    ups = [process.up_s for process in back.ranks.values()]
    whole = len(ups) >= back.world_size
    up = max(ups) if ups and whole else None
    return {
        "rendezvous": after.last(_is_rendezvous, up) or after.last(_is_start, up),
        "workers_up": up,
        "restored": max((at for at in loads if first is None or at <= first), default=None),
        "first_step": first,
    }


def _lost(history: History, attempt: int, reached: int | None) -> int | None:
    """Steps that had been done and were lost: from the base of the next attempt that made steps up to the highest."""
    bases = [one.base for one in history.attempts if one.number > attempt and one.first_step is not None]
    if reached is None:
        return 0
    return None if not bases or bases[0] is None else max(0, reached - bases[0])


def first_within(record: Record, landing: Landing) -> Execution | None:
    """The step by which the attempt that was hit went on by itself: the target's own first one beyond the highest
    step before the fault. None where the target dies of it, at once or after a grace period, or the job was hit."""
    planned = next((one for one in record.plan.faults if one.id == landing.fault), None)
    if planned and registry.is_lethal(planned.inject):
        return None
    if landing.pids & {event.data["pid"] for event in record.of_kind(Kind.JOB_STARTED)}:
        return None
    before = record.history.highest_step(before_s=landing.at_s) or 0
    before += _did_not_last(record, landing)  # the step that was under way proves nothing of a job that then died
    anybody = not landing.ranks or record.history.source == "log"  # a log tells of one rank
    own = [
        one for one in record.history.executions
        if one.attempt == landing.attempt and one.mono_s > landing.at_s and (one.global_step or 0) > before
        and (anybody or one.rank in landing.ranks)
    ]  # fmt: skip
    return min(own, key=lambda one: one.mono_s, default=None)


def _did_not_last(record: Record, landing: Landing) -> bool:
    """Whether the attempt that was hit ended in a restart, and nothing else that hit it explains that."""
    others = [one for one in landings(record) if one.attempt == landing.attempt and one.at_s > landing.at_s]
    return not others and any(one.number > landing.attempt for one in record.history.attempts)


def highest_up_to(history: History, attempt: int) -> int | None:
    reached = [one.last_step for one in history.attempts if one.number <= attempt and one.last_step is not None]
    return max(reached, default=None)


def _is_end_of(event: Event, landing: Landing) -> bool:
    """Whether this is the end of a process that the fault hit."""
    if event.kind is Kind.JOB_EXITED:
        return not landing.ranks
    if event.kind is not Kind.RANK_EXITED:
        return False
    if landing.pids and event.data.get("pid") is not None:
        return event.data["pid"] in landing.pids
    return event.rank in landing.ranks or not landing.ranks


def _is_rendezvous(event: Event) -> bool:
    return event.kind is Kind.ELASTIC_RENDEZVOUS and bool(event.data["done"])


def _is_start(event: Event) -> bool:
    return event.kind is Kind.ELASTIC_WORKER and event.data["state"] == "START"


def _end_after(attempt: Attempt | None, at_s: float) -> float | None:
    ended = attempt.ended_s if attempt else None
    return ended if ended is not None and ended >= at_s else None


def _recovery(landing: Landing, seen: dict[str, float | None], lost: int | None) -> Recovery:
    parts = {part: seen.get(part) for part in PARTS}
    since = {part: None if at is None else round(at - landing.at_s, 6) for part, at in parts.items()}
    return Recovery(landing.fault, since, lost)


def _earliest(*times: float | None) -> float | None:
    return min((at for at in times if at is not None), default=None)


@dataclass(frozen=True)
class _After:
    """Events since a moment."""

    events: Sequence[Event]
    at_s: float

    def _times(self, wanted: Callable[[Event], bool]) -> Iterable[float]:
        return (event.mono_s for event in self.events if event.mono_s >= self.at_s and wanted(event))

    def first(self, wanted: Callable[[Event], bool]) -> float | None:
        return min(self._times(wanted), default=None)

    def last(self, wanted: Callable[[Event], bool], until_s: float | None) -> float | None:
        return max((at for at in self._times(wanted) if until_s is None or at <= until_s), default=None)
