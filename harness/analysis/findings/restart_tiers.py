"""How a job was brought back: in place, on another node, or by a new submission."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from torchaos.harness.analysis.hit_targets import Landing
from torchaos.harness.analysis.recovery_times import end_of
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.history import Attempt
from torchaos.harness.record.record import Record

Tier = Literal["none", "in_place", "node_replaced", "shrunk", "grown", "resubmitted"]
TIERS: tuple[Tier, ...] = ("none", "in_place", "node_replaced", "shrunk", "grown", "resubmitted")
TIERS_IN_WORDS = {
    "none": "went on without a restart",
    "in_place": "was restarted in place, on the same nodes",
    "node_replaced": "was restarted on other nodes, or on a node that was started anew",
    "shrunk": "was restarted with fewer ranks or nodes than before",
    "grown": "was restarted with more ranks or nodes than before",
    "resubmitted": "was submitted again as a whole",
}


def tier_name(landing: Landing, landed: Sequence[Landing]) -> str:
    """The fault's name for a reason. A fault that landed in several attempts is named with the attempt."""
    often = sum(one.fault == landing.fault for one in landed) > 1
    return f"{landing.fault} in attempt {landing.attempt}" if often else landing.fault


def worst_tier(tiers: Sequence[Between | None]) -> Tier | None:
    """The worst tier; None (no recovery at all) is worse than any tier."""
    return None if None in tiers else max((tier.most for tier in tiers if tier), key=TIERS.index, default=None)


class Between(NamedTuple):
    """The tier of a recovery: a single one, or a range if the nodes of some ranks were not seen."""

    least: Tier
    most: Tier

    def __str__(self) -> str:
        if self.least == self.most:
            return TIERS_IN_WORDS[self.most]
        return f"was restarted, and the nodes of some ranks were not seen: {self.least} or {self.most}"


def tier_of(run: Record, landing: Landing, twins: Sequence[Record] = ()) -> Between | None:
    """The highest tier of the restarts of a recovery. None if training never continued after the fault. An attempt that
    made no step is left out, because no training went on in it."""
    back = end_of(run, landing, twins)
    if back is None:
        return None
    if back.attempt == landing.attempt:
        return Between("none", "none")
    trained = {landing.attempt, back.attempt} | set(run.history.executions.attempts)
    lives = [
        attempt for attempt in run.history.attempts
        if landing.attempt <= attempt.number <= back.attempt and attempt.number in trained
    ]  # fmt: skip
    steps = [_between(run, old, new) for old, new in pairwise(lives)] or [Between("none", "none")]
    least, most = (max(ends, key=TIERS.index) for ends in zip(*steps, strict=True))
    return Between(least, most)


def _between(run: Record, old: Attempt, new: Attempt) -> Between:
    if old.submission != new.submission:
        return Between("resubmitted", "resubmitted")
    before, after = _nodes(run, old), _nodes(run, new)
    size = new.world_size - old.world_size or (len(after) - len(before) if before and after else 0)
    if size:
        tier: Tier = "shrunk" if size < 0 else "grown"
        return Between(tier, tier)
    if before is None or after is None:
        return Between("in_place", "in_place" if run.plan.job.nodes == 1 else "node_replaced")
    anew = any(  # the first start of a standby node is no restart
        old.started_s < event.mono_s <= new.started_s and event.data["node"] in before & after
        for event in run.of_kind(Kind.NODE_STARTED)
    )
    tier = "node_replaced" if anew or before != after else "in_place"
    return Between(tier, tier)


def _nodes(run: Record, attempt: Attempt) -> set[int] | None:
    """The nodes of an attempt. None if the node of a rank was not seen."""
    ups = [event for event in run.of_kind(Kind.RANK_UP) if event.attempt == attempt.number]
    seen = {event.rank: event.data["node"] for event in ups if event.data["node"] is not None}
    return set(seen.values()) if len(seen) >= attempt.world_size else None
