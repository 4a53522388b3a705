"""How was the job brought back after each fault: in place, on another node, or by a new submission?
These tiers are those of multi-level restart (Baidu). Each tier costs more than the tier before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Assertion, Finding, Harm, Need, Outcome, Record, failed, inconclusive, passed, unhit
from torchaos.plugin.analysis import (
    TIERS,
    TIERS_IN_WORDS,
    Landing,
    Tier,
    evictions,
    lacking,
    landings,
    offenders,
    tier_name,
    tier_of,
    why_moot,
    why_unplaced,
    worst_tier,
)


@dataclass(frozen=True)
class RestartTier(Assertion):
    """Bounds the highest tier that was needed after each fault, until the job had got further than before the fault.
    `most`: the highest tier that is allowed. `least`: the lowest tier that is allowed. `node_replaced`: as many ranks
    as before, but on other nodes, or on a node that was started again. `shrunk`: with fewer ranks or nodes. `grown`:
    with more, as when a lost node comes back to a job that had shrunk; this costs one more restart. `evicted`: how many
    nodes may be without ranks at the end that had ranks when a fault landed, and that no fault hit. `excluded_after`:
    a node that this number of faults has hit gets no ranks in later attempts."""

    name = "restart_tier"
    harm = Harm.SLOW
    needs = frozenset({Need.STEPS})

    most: Tier = "resubmitted"
    least: Tier = "none"
    evicted: int | None = None
    excluded_after: int | None = None

    def __post_init__(self) -> None:
        if self.excluded_after is not None and self.excluded_after < 1:
            raise ValueError("excluded_after is a number of faults; it is 1 or more")

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        bound = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self._judge(run, twins), bound=bound)

    def _judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        landed = landings(run)
        if not landed:
            return unhit("no fault landed, so there was nothing to recover from")
        if blind := lacking(run, Need.STEPS):
            return blind
        if run.history.unplaced:
            return inconclusive(why_unplaced(run, run.history.unplaced))
        tiers = [(one, tier_of(run, one, twins)) for one in landed]
        measured = {"tier": max((tier.most for _one, tier in tiers if tier), key=TIERS.index, default=None)}
        faults = dict.fromkeys(landing.fault for landing in landed)
        measured |= {fault: worst_tier([tier for one, tier in tiers if one.fault == fault]) for fault in faults}
        moot = [(one, why) for one, tier in tiers if tier is None and (why := why_moot(run, one.fault, twins))]
        for one, why in moot[:1]:
            return inconclusive(f"{tier_name(one, landed)}: {why}", **measured)
        found = [(tier_name(one, landed), tier) for one, tier in tiers]
        wrong = [f"{fault}: the job {words}" for fault, tier in found if (words := self._out_of_bounds(tier))]
        if wrong:
            return failed(wrong[0], **measured)
        for finding in self._of_nodes(run, landed):
            measured |= finding.measured
            if finding.outcome is not Outcome.PASSED:
                return replace(finding, measured=measured)
        for fault, tier in found:
            if tier and (self._too_high(tier.most) or self._too_low(tier.least)):
                return inconclusive(f"{fault}: the job {tier}", **measured)
        return passed("; ".join(f"{fault}: the job {tier}" for fault, tier in found), **measured)

    def _out_of_bounds(self, tier: tuple[Tier, Tier] | None) -> str:
        """Which bound a recovery certainly breaks, as a clause; empty if perhaps none. `tier`: the lowest and the
        highest tier that fit what was seen; None: the job did not come back."""
        if tier is None:
            return "did not come back: it never got further than before the fault"
        least, most = tier
        if self._too_high(least):
            return f"{TIERS_IN_WORDS[least]}; at most {self.most} is allowed"
        if self._too_low(most):
            return f"{TIERS_IN_WORDS[most]}; at least {self.least} was expected"
        return ""

    def _too_high(self, tier: Tier) -> bool:
        return TIERS.index(tier) > TIERS.index(self.most)

    def _too_low(self, tier: Tier) -> bool:
        return TIERS.index(tier) < TIERS.index(self.least)

    def _of_nodes(self, run: Record, landed: Sequence[Landing]) -> Iterator[Finding]:
        """Judges which nodes the job left out: no healthy node too many, and each node that faults had hit too
        often."""
        if self.evicted is not None:
            yield evictions(run, landed, self.evicted)
        if self.excluded_after is not None:
            yield offenders(run, landed, self.excluded_after)
