"""Whether the right ranks were blamed for a hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.harness.analysis.caught_up import pace_of
from torchaos.harness.analysis.hangs import Stall, stalls_of, why_unread, why_unseen
from torchaos.harness.interfaces import Finding, Need, Outcome, failed, inconclusive, passed
from torchaos.harness.monitoring.observers.opinions import Rule
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record

_LOOK_S = 1.0  # seconds that the observers need to read stacks and counters


@dataclass(frozen=True)
class Blame:
    """Compares the blamed ranks with the ranks that faults hit. `precision`: the share of blamed ranks that must be
    right. `recall`: the share of hit ranks that must be blamed. `report`: the name of another tool's report."""

    precision: float = 1.0
    recall: float = 1.0
    report: str | None = None

    def finding(self, run: Record) -> Finding:
        stalls = [stall for stall in stalls_of(run) if stall.ranks]
        if not stalls and (hang := next((stall for stall in stalls_of(run) if stall.attempt is not None), None)):
            return inconclusive(f"no fault shows who is to blame for {hang.name}")
        if not stalls:
            return inconclusive("no fault was applied to a rank, so nobody could be blamed correctly")
        if self.report is not None:
            named = _of_report(run)
            if isinstance(named, str):
                return inconclusive(f"{self.report}: {named}")
            return self._score([(frozenset().union(*(stall.ranks for stall in stalls)), named)], "the report")
        if Need.HANGS not in run.plan.collect:
            return inconclusive("this run was made without our observers; run the scenario again")
        blamed = {stall: _named(run, stall) for stall in stalls}
        needed_s = _needed_s(run, stalls[0].since_s)
        short = [stall for stall in stalls if blamed[stall] is None and stall.until_s - stall.since_s < needed_s]
        unseen = [why for stall in stalls if blamed[stall] is None and (why := why_unseen(run, stall))]
        if unseen and not short:
            return inconclusive(f"our observers could not tell whether the job hung; {unseen[0]}")
        unread = [why for stall in stalls if blamed[stall] == frozenset() and (why := why_unread(run, stall))]
        if unread:
            return inconclusive(f"a hang was declared and nobody blamed, since no stacks could be read: {unread[0]}")
        pairs = [(stall.ranks, blamed[stall]) for stall in stalls if stall not in short]
        found = self._score(pairs, "our diagnosis") if pairs else None
        if found and (not short or found.outcome is Outcome.FAILED):
            return found
        lasted_s = short[0].until_s - short[0].since_s
        return inconclusive(
            f"{short[0].fault} lasted only {lasted_s:.2f} s, and in this job our observers may need {needed_s:.2f} s "
            "to tell a hang from a pause; make it longer"
        )

    def _score(self, pairs: Sequence[tuple[frozenset[int], frozenset[int] | None]], who: str) -> Finding:
        blamed = [(hit, named or frozenset()) for hit, named in pairs]
        right = sum(len(hit & named) for hit, named in blamed)
        all_named, all_hit = (sum(len(pair[side]) for pair in blamed) for side in (1, 0))
        precision = right / all_named if all_named else None
        recall = right / all_hit
        measured: dict[str, Any] = {
            "precision": precision, "recall": recall,
            "hit": [sorted(hit) for hit, _ in blamed], "blamed": [sorted(named) for _, named in blamed],
        }  # fmt: skip
        for hit, named in pairs:
            said = "nobody: no hang was declared" if named is None else _ranks(named)
            if recall < self.recall and not hit <= (named or frozenset()):
                return failed(f"{_ranks(hit)} held up the job, and {who} blamed {said}", **measured)
        wrong = frozenset[int]().union(*(named - hit for hit, named in blamed))
        if precision is not None and precision < self.precision:
            return failed(f"{who} blamed {_ranks(wrong)}, which no fault had hit", **measured)
        return passed(
            f"{who} blamed {right} of {counted(all_hit, 'rank', 'that was/that were')} hit, "
            f"and {counted(len(wrong), 'other')}",
            **measured,
        )


def _needed_s(run: Record, before_s: float) -> float:
    """The shortest stall, in seconds, that torchaos's observers declare as a hang in this job. It depends on how long
    the job itself pauses."""
    rule = Rule()
    return max(rule.floor_s, rule.k * pace_of(run.history, before_s).longest_s) + _LOOK_S


def _named(run: Record, stall: Stall) -> frozenset[int] | None:
    """The ranks that the last declaration of a hang during the fault blamed. The last declaration has the most
    evidence. None: no hang was declared."""
    found = [
        event for event in run.of_kind(Kind.HANG_DECLARED)
        if stall.since_s <= float(event.data.get("declared_s", event.mono_s)) <= stall.until_s
    ]  # fmt: skip
    return frozenset(found[-1].data["ranks"]) if found else None


def _of_report(run: Record) -> frozenset[int] | str:
    """The ranks in the report, or the reason why the report can't be judged."""
    raw = run.artifacts.get("report")
    if not isinstance(raw, dict):
        return "it was not collected; run the scenario again"
    if "error" in raw:
        return str(raw["error"])
    return frozenset(raw["culprits"])


def _ranks(ranks: frozenset[int]) -> str:
    if not ranks:
        return "nobody"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
