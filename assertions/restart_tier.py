"""How was the job brought back after each fault: in place, on another node, or by a new submission?
These tiers are those of multi-level restart (Baidu). Each tier costs more than the tier before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.analysis.recovery_times import end_of, why_moot
from torchaos.plugin import Assertion, Finding, Harm, Kind, Need, Record, failed, inconclusive, passed, unhit
from torchaos.plugin.analysis import Attempt, Landing, landings

Tier = Literal["none", "in_place", "node_replaced", "shrunk", "grown", "resubmitted"]
TIERS: tuple[Tier, ...] = ("none", "in_place", "node_replaced", "shrunk", "grown", "resubmitted")
_WORDS = {
    "none": "went on without a restart",
    "in_place": "was restarted in place, on the same nodes",
    "node_replaced": "was restarted on other nodes, or on a node that was started anew",
    "shrunk": "was restarted with fewer ranks or nodes than before",
    "grown": "was restarted with more ranks or nodes than before",
    "resubmitted": "was submitted again as a whole",
}


@dataclass(frozen=True)
class RestartTier(Assertion):
    """Bounds the highest tier that was needed after each fault, until the job had got further than before the fault.
    `most`: the highest tier that is allowed. `least`: the lowest tier that is allowed. `node_replaced`: as many ranks
    as before, but on other nodes, or on a node that was started again. `shrunk`: with fewer ranks or nodes. `grown`:
    with more, as when a lost node comes back to a job that had shrunk; this costs one more restart."""

    name = "restart_tier"
    harm = Harm.SLOW
    needs = frozenset({Need.STEPS})

    most: Tier = "resubmitted"
    least: Tier = "none"

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return replace(self._judge(run, twins), bound={"most": self.most, "least": self.least})

    def _judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        landed = landings(run)
        if not landed:
            return unhit("no fault landed, so there was nothing to recover from")
        if not run.history.executions:
            return inconclusive(f"no step was seen, so nothing shows when the job went on: {why_unseen(run, 'steps')}")
        if run.history.unplaced:
            return inconclusive(why_unplaced(run, run.history.unplaced))
        tiers = [tier_of(run, landing, twins) for landing in landed]
        measured = {"tier": max((tier.most for tier in tiers if tier), key=TIERS.index, default=None)}
        for fault in dict.fromkeys(landing.fault for landing in landed):
            measured[fault] = _worst([tier for one, tier in zip(landed, tiers, strict=True) if one.fault == fault])
        for one, tier in zip(landed, tiers, strict=True):
            if tier is None and (why := why_moot(run, one.fault, twins)):
                return inconclusive(f"{_name(one, landed)}: {why}", **measured)
        found = [(_name(one, landed), tier) for one, tier in zip(landed, tiers, strict=True)]
        unseen = None
        for fault, tier in found:
            if tier is None:
                return failed(
                    f"{fault}: the job did not come back: it never got further than before the fault", **measured
                )
            if TIERS.index(tier.least) > TIERS.index(self.most):
                return failed(f"{fault}: the job {_WORDS[tier.least]}; at most {self.most} is allowed", **measured)
            if TIERS.index(tier.most) < TIERS.index(self.least):
                return failed(f"{fault}: the job {_WORDS[tier.most]}; at least {self.least} was expected", **measured)
            if TIERS.index(tier.most) > TIERS.index(self.most) or TIERS.index(tier.least) < TIERS.index(self.least):
                unseen = unseen or f"{fault}: the job {tier}"
        if unseen:
            return inconclusive(unseen, **measured)
        return passed("; ".join(f"{fault}: the job {tier}" for fault, tier in found), **measured)


def _name(landing: Landing, landed: Sequence[Landing]) -> str:
    """The fault's name for a reason. A fault that landed in several attempts is named with the attempt."""
    often = sum(one.fault == landing.fault for one in landed) > 1
    return f"{landing.fault} in attempt {landing.attempt}" if often else landing.fault


def _worst(tiers: Sequence[Between | None]) -> Tier | None:
    """The worst tier; None (no recovery at all) is worse than any tier."""
    return None if None in tiers else max((tier.most for tier in tiers if tier), key=TIERS.index, default=None)


class Between(NamedTuple):
    """The tier of a recovery: a single one, or a range if the nodes of some ranks were not seen."""

    least: Tier
    most: Tier

    def __str__(self) -> str:
        if self.least == self.most:
            return _WORDS[self.most]
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
