"""How was the job brought back after each fault: by torchelastic in place, on another node, or by a new submission?
These tiers are those of multi-level restart (Baidu). Each tier costs more than the tier before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from torchaos.harness.judging.gaps.unseen import why_unplaced, why_unseen
from torchaos.harness.judging.recovery.recovery import end_of, why_moot
from torchaos.plugin import (
    Assertion,
    Attempt,
    Finding,
    Harm,
    Kind,
    Landing,
    Need,
    Record,
    failed,
    inconclusive,
    landings,
    passed,
)

Tier = Literal["none", "in_place", "node_replaced", "resubmitted"]
TIERS: tuple[Tier, ...] = ("none", "in_place", "node_replaced", "resubmitted")
_WORDS = {
    "none": "went on without a restart",
    "in_place": "was restarted in place, by torchelastic on the same nodes",
    "node_replaced": "was restarted by torchelastic on other nodes, or on a node that was started anew",
    "resubmitted": "was submitted again as a whole",
}


@dataclass(frozen=True)
class RestartTier(Assertion):
    """Bounds the highest tier that was needed after each fault, until the job had got further than before the fault.
    `most`: the highest tier that is allowed. `least`: the lowest tier that is allowed. `node_replaced`: the set of
    nodes must have changed, or a node must have been started again."""

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
            return inconclusive("no fault landed, so there was nothing to recover from")
        if not run.history.executions:
            return inconclusive(f"no step was seen, so nothing shows when the job went on: {why_unseen(run, 'steps')}")
        if run.history.unplaced:
            return inconclusive(why_unplaced(run, run.history.unplaced))
        tiers = [tier_of(run, landing, twins) for landing in landed]
        measured = {"tier": max((tier for tier in tiers if tier), key=TIERS.index, default=None)}
        for fault in dict.fromkeys(landing.fault for landing in landed):
            measured[fault] = _worst([tier for one, tier in zip(landed, tiers, strict=True) if one.fault == fault])
        for one, tier in zip(landed, tiers, strict=True):
            if tier is None and (why := why_moot(run, one.fault, twins)):
                return inconclusive(f"{_name(one, landed)}: {why}", **measured)
        found = [(_name(one, landed), tier) for one, tier in zip(landed, tiers, strict=True)]
        for fault, tier in found:
            if tier is None:
                return failed(
                    f"{fault}: the job did not come back: it never got further than before the fault", **measured
                )
            if TIERS.index(tier) > TIERS.index(self.most):
                return failed(f"{fault}: the job {_WORDS[tier]}; at most {self.most} is allowed", **measured)
            if TIERS.index(tier) < TIERS.index(self.least):
                return failed(f"{fault}: the job {_WORDS[tier]}; at least {self.least} was expected", **measured)
        return passed("; ".join(f"{fault}: the job {_WORDS[tier or 'none']}" for fault, tier in found), **measured)


def _name(landing: Landing, landed: Sequence[Landing]) -> str:
    """The fault's name for a reason. A fault that landed in several attempts is named with the attempt."""
    often = sum(one.fault == landing.fault for one in landed) > 1
    return f"{landing.fault} in attempt {landing.attempt}" if often else landing.fault


def _worst(tiers: Sequence[Tier | None]) -> Tier | None:
    """The worst tier; None (no recovery at all) is worse than any tier."""
    return None if None in tiers else max((tier for tier in tiers if tier), key=TIERS.index, default=None)


def tier_of(run: Record, landing: Landing, twins: Sequence[Record] = ()) -> Tier | None:
    """The tier of the recovery. None if training never continued after the fault."""
    back = end_of(run, landing, twins)
    if back is None:
        return None
    if back.attempt == landing.attempt:
        return "none"
    history = run.history
    lives = [attempt for attempt in history.attempts if landing.attempt <= attempt.number <= back.attempt]
    steps = [_between(run, old, new) for old, new in pairwise(lives)]
    return max(steps, key=TIERS.index, default="none")


def _between(run: Record, old: Attempt, new: Attempt) -> Tier:
    if old.submission != new.submission:
        return "resubmitted"
    again = any(
        old.started_s < event.mono_s <= new.started_s and event.data["submission"] == new.submission
        for event in run.of_kind(Kind.NODE_STARTED)
    )
    return "node_replaced" if again or _nodes(run, old) != _nodes(run, new) else "in_place"


def _nodes(run: Record, attempt: Attempt) -> set[int]:
    return {event.data["node"] for event in run.of_kind(Kind.RANK_UP) if event.attempt == attempt.number}
