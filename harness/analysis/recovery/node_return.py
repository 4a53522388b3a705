"""Finds the restart that follows the end of a fault: a job that lost a node because of a fault gets the node back, and
torchelastic restarts the ranks. That restart belongs to the recovery, however long the node takes to join. Each
rollback explains at most one restart, and never a restart that another landing explains."""

from __future__ import annotations

import math
from itertools import pairwise

from torchaos.harness.analysis.hit_targets import Landing, RunSoFar, landings
from torchaos.harness.protocol.wire import Event, Kind

BACK = "back"  # `what` of an effect event: the injector itself ended the fault


def _is_way_back(event: Event) -> bool:
    return event.kind is Kind.ROLLED_BACK or (event.kind is Kind.EFFECT and event.data.get("what") == BACK)


def way_back_s(run: RunSoFar, landing: Landing, *kinds: Kind) -> float | None:
    """The time (CLOCK_MONOTONIC) at which the fault was taken off the job: by its rollback, or by the injector itself.
    None if it stayed."""
    back = (event for event in run.of_kind(*kinds) if _is_way_back(event))
    mine = [event.mono_s for event in back if event.data["fault"] == landing.fault and event.mono_s > landing.at_s]
    return min(mine, default=None)


def over_s(run: RunSoFar, landing: Landing, in_process: bool = False) -> float:
    """When the fault was over (CLOCK_MONOTONIC); infinite if it stayed. `in_process`: it was over when the last process
    that it hit had ended, if the job was restarted then."""
    backs = [way_back_s(run, landing, Kind.ROLLED_BACK, Kind.EFFECT)]
    if in_process and landing.pids and any(attempt.number > landing.attempt for attempt in run.history.attempts):
        gone = {e.data["pid"]: e.mono_s for e in run.of_kind(Kind.RANK_EXITED) if e.data["pid"] in landing.pids}
        backs += [max(gone.values())] if gone.keys() == landing.pids else []
    return min((at for at in backs if at is not None and at > landing.at_s), default=math.inf)


def lasted_s(run: RunSoFar, landing: Landing, in_process: bool = False) -> float | None:
    """The seconds for which the fault was on, see over_s(). None if it was on until the job or the run ended."""
    end_s = over_s(run, landing, in_process)
    ends = [event.mono_s for event in run.of_kind(Kind.JOB_EXITED, Kind.STOPPED) if event.mono_s > landing.at_s]
    return None if end_s == math.inf or end_s > min(ends, default=end_s) else round(end_s - landing.at_s, 3)


def growths(run: RunSoFar) -> dict[int, Landing]:
    """The attempts that ended because a fault was over and its ranks came back; each with the landing of that fault.
    The attempt after it has more ranks.

    The rollbacks are taken in order of time. Each takes the first attempt that no earlier rollback has taken."""
    landed = landings(run)
    hit = {landing.attempt for landing in landed}
    grown = [
        (old.number, new.started_s) for old, new in pairwise(run.history.attempts)
        if new.world_size > old.world_size and old.number not in hit
    ]  # fmt: skip
    found: dict[int, Landing] = {}
    for back in filter(_is_way_back, run.of_kind(Kind.ROLLED_BACK, Kind.EFFECT)):
        before = [landing for landing in landed if landing.fault == back.data["fault"] and landing.at_s < back.mono_s]
        later = (
            number for number, ended_s in grown if before and number > before[-1].attempt and ended_s > back.mono_s
        )
        first = next((number for number in later if number not in found), None)
        if first is not None:
            found[first] = before[-1]
    return found
