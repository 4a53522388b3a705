"""How often, by whom and in which way a job was brought back, and whether it gave up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from torchaos.harness.analysis.ending import cause_of_end, last_error, said_at_the_end, teardown_aborts
from torchaos.harness.analysis.hit_targets import Landing, landings
from torchaos.harness.analysis.recovery_times import end_of
from torchaos.harness.interfaces import Finding, failed, inconclusive, passed
from torchaos.harness.monitoring.probes.known_failures import BY_NAME
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.history import Attempt
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record

Who = Literal["torchelastic", "resubmission", "command"]
_BY = {"torchelastic": "torchelastic", "resubmission": "resubmission", "command": "another torchrun of its command"}

_ELASTIC = (Kind.TORCHRUN, Kind.ELASTIC_WORKER, Kind.ELASTIC_FAILURE, Kind.ELASTIC_RENDEZVOUS, Kind.ELASTIC_RESTART)


@dataclass(frozen=True)
class Restart:
    who: Who | None  # None: nothing shows it
    attempt: int  # the attempt that began with it
    why: str


def gave_up(run: Record, within_s: float, why: str | None = None) -> Finding:
    """Judges whether the job ended with an error, at most `within_s` seconds after the first fault. `why`: a regular
    expression for the line at the end of the log that says why."""
    starts = [event.mono_s for event in run.of_kind(Kind.JOB_STARTED)]
    landed = landings(run)
    since = landed[0].at_s if landed else min(starts, default=0.0)
    last, stopped = run.exited, run.stopped
    if not last or last.mono_s < max(starts, default=0.0) or (stopped and stopped.mono_s <= last.mono_s):
        return failed(f"the job never gave up: it was in attempt {run.history.attempts[-1].number} when it was stopped")
    took = last.mono_s - since
    if run.exit_code == 0:
        return failed("the job ended with exit code 0: it did not report that it had failed", gave_up_s=took)
    if took > within_s:
        return failed(f"the job gave up after {took:.1f} s, {took - within_s:.1f} s too late", gave_up_s=took)
    how = f"the job gave up after {took:.1f} s with exit code {run.exit_code}"
    if why is None:
        return passed(how, gave_up_s=took)
    if not run.log_end:
        return inconclusive(f"{how}, and its log was not seen", gave_up_s=took)
    said = said_at_the_end(run, why)
    if said is None:
        return failed(f"{how}, and no line at the end of its log matches {why!r}{last_error(run)}", gave_up_s=took)
    return passed(f"{how}: {said}", gave_up_s=took)


def restarts_of(run: Record, last_step: int | None) -> tuple[list[Restart], int]:
    """The restarts of the job, and the number of restarts after the job was done."""
    done = {abort.attempt for abort in teardown_aborts(run, last_step)}
    pairs = list(pairwise(run.history.attempts))
    begun = {event.attempt for event in run.of_kind(Kind.TORCHRUN) if not event.data["ended"]}
    elastic: Who | None = "torchelastic" if run.plan.job.attached or any(run.of_kind(*_ELASTIC)) else None
    found = []
    for old, new in pairs:
        if old.number not in done:
            within = "command" if new.number in begun else elastic
            who: Who | None = within if old.submission == new.submission else "resubmission"
            found.append(Restart(who, new.number, _why(run, old)))
    return found, len(pairs) - len(found)


def _why(run: Record, old: Attempt) -> str:
    """The cause of a restart: the first rank that ended by itself, and the cause that the log names."""
    ended = [
        (process.exited_s or 0.0, rank) for rank, process in old.ranks.items() if process.exit_code not in (None, 0)
    ]
    cause = cause_of_end(run, old.number)
    known = f" ({cause})" if cause else ""
    if ended and (about := BY_NAME.get(cause)) and about.is_consequence:
        known = ""  # the others lost the connection to this rank
    if not ended:
        return f"nothing shows why attempt {old.number} ended{known}"
    rank = min(ended)[1]
    code = old.exit_codes[rank] or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how} in attempt {old.number}{known}"


def restarts_in_words(found: Sequence[Restart]) -> str:
    if not found:
        return "the job was not restarted"
    times = "once" if len(found) == 1 else f"{len(found)} times"
    known = {_BY[restart.who] for restart in found if restart.who}
    by = f", by {' and '.join(sorted(known))}" if all(restart.who for restart in found) else ""
    return f"the job was restarted {times}{by}: {found[0].why}"


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
    anew = any(  # the first start of a standby node does not count as a restart
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


def evictions(run: Record, landed: Sequence[Landing], most: int) -> Finding:
    """Judges whether at most `most` nodes lost their ranks for good although no fault had hit them."""
    gone = _evicted(run, landed)
    if gone is None:
        return inconclusive("the node of some ranks was not seen, so nobody knows which nodes were evicted")
    if len(gone) <= most:
        return passed("", evicted=len(gone))
    which = f"{counted(len(gone), 'node')} (node {', '.join(map(str, sorted(gone)))})"
    return failed(f"{which} lost all ranks for good, and no fault had hit there; {most} allowed", evicted=len(gone))


def _evicted(run: Record, landed: Sequence[Landing]) -> set[int] | None:
    """The evicted nodes: they had ranks when a fault landed, no fault had hit them, and they have no ranks in the last
    attempt in which training went on. None if the node of a rank was not seen."""
    trained = set(run.history.executions.attempts)
    last = next((one for one in reversed(run.history.attempts) if one.number in trained), None)
    there = _nodes(run, last) if last else None
    if there is None:
        return None
    hit, had = set[int](), set[int]()
    for landing in landed:
        before, nodes = _nodes_before(run, landing), _nodes_hit(run, landing)
        if before is None or nodes is None:
            return None
        had, hit = had | before, hit | nodes
    return had - hit - there


def offenders(run: Record, landed: Sequence[Landing], most: int) -> Finding:
    """Judges whether each node that at least `most` faults had hit was kept out of all later attempts."""
    offences, barred = Counter[int](), dict[int, int]()
    for landing in landed:
        nodes = _nodes_hit(run, landing)
        if nodes is None:
            return inconclusive("the node of some ranks was not seen, so nobody knows which nodes failed how often")
        offences.update(nodes)
        barred.update({node: landing.attempt for node in nodes if offences[node] == most})
    if not barred:
        return inconclusive(f"no node was hit {most} times, so there was none to keep out")
    for up in run.of_kind(Kind.RANK_UP):
        node, attempt = up.data["node"], up.attempt or 0
        if node is None and attempt > min(barred.values()):
            return inconclusive(f"it is not known on which node rank {up.rank} was in attempt {attempt}")
        if attempt > barred.get(node, attempt):
            times = counted(most, "fault")
            return failed(f"node {node} had rank {up.rank} again in attempt {attempt}, after {times} had hit it")
    return passed("")


def _nodes_before(run: Record, landing: Landing) -> set[int] | None:
    """The nodes that had ranks in the attempt in which the fault landed. None if the node of a rank was not seen."""
    nodes = {up.data["node"] for up in run.of_kind(Kind.RANK_UP) if up.attempt == landing.attempt}
    return None if None in nodes else nodes


def _nodes_hit(run: Record, landing: Landing) -> set[int] | None:
    """The nodes of the ranks that the fault hit, or else those that it was aimed at. None if the node of a rank was not
    seen."""
    ups = (up for up in run.of_kind(Kind.RANK_UP) if up.attempt == landing.attempt and up.rank in landing.ranks)
    nodes = {up.data["node"] for up in ups}
    if None in nodes:
        return None
    aimed = (node for fault in run.plan.faults if fault.id == landing.fault for node in fault.target.nodes)
    return nodes or set(aimed)
