"""What a job that shrank for a fault does when the fault is over: it grows, by one more restart. Pure.

That restart is of the recovery, however long the node takes to join again. Each way back accounts for one at most, and
for none that another landing explains.
"""

from __future__ import annotations

from itertools import pairwise

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.judging.landing.landings import Landing, Told, landings

BACK = "back"  # `what` of an effect: the injector itself has brought back what it took away


def _is_way_back(event: Event) -> bool:
    return event.kind is Kind.ROLLED_BACK or (event.kind is Kind.EFFECT and event.data.get("what") == BACK)


def way_back_s(told: Told, landing: Landing, *kinds: Kind) -> float | None:
    """When this fault was over, CLOCK_MONOTONIC, by the events of these kinds; None where it never was."""
    back = (event for event in told.events if _is_way_back(event) and event.kind in kinds)
    mine = [one.mono_s for one in back if one.data["fault"] == landing.fault and one.mono_s > landing.at_s]
    return min(mine, default=None)


def growths(told: Told) -> dict[int, Landing]:
    """The attempts that ended in a restart because what a landing had taken away was there again: the next one is
    larger. In order of time, each way back accounts for the first of them that no earlier one does."""
    landed = landings(told)
    hit = {one.attempt for one in landed}
    grown = [
        (old.number, new.started_s) for old, new in pairwise(told.history.attempts)
        if new.world_size > old.world_size and old.number not in hit
    ]  # fmt: skip
    found: dict[int, Landing] = {}
    for back in filter(_is_way_back, told.events):
        before = [one for one in landed if one.fault == back.data["fault"] and one.at_s < back.mono_s]
        later = (
            number for number, ended_s in grown if before and number > before[-1].attempt and ended_s > back.mono_s
        )
        first = next((number for number in later if number not in found), None)
        if first is not None:
            found[first] = before[-1]
    return found
