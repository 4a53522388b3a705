"""Who noticed that a job hung, how fast, and whether the right ranks were blamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchaos.harness.analysis.hangs import Stall, let_it_last, stalls_of, too_short, why_unread, why_unseen
from torchaos.harness.interfaces import Finding, Need, Outcome, failed, inconclusive, passed, unhit
from torchaos.harness.monitoring.probes.known_failures import BY_NAME
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record

_UNTOLD = "our observers could not tell whether the job hung"
_LATE_S = 1.0  # seconds after the death of a rank in which a log line of the rank may still come


@dataclass(frozen=True)
class HangReaction:
    """Who noticed the stalls of a run. `by`: who must notice them. `within`, `suspected_within`: seconds from the
    fault. `pattern`: a regular expression for the job's own log line."""

    by: Literal["anyone", "job", "observers"] = "anyone"
    within: float | None = None
    suspected_within: float | None = None
    pattern: str | None = None

    def finding(self, run: Record) -> Finding:
        stalls = list(stalls_of(run))
        if not stalls:
            return unhit("no fault landed, so there was nothing to notice")
        if self.by != "job" and Need.HANGS not in run.plan.collect:
            return inconclusive("this run was made without our observers; run the scenario again")
        found = [self._noticed(run, one) for one in stalls]
        measured = {"noticed": found, "false_alarms": _false_alarms(run, stalls[0].since_s)}
        for stall, one in zip(stalls, found, strict=True):
            if problem := self._problem(run, stall, one):
                return replace(problem, measured=measured)
        who, after = max((self._first_of(one) for one in found), key=lambda first: first[1] or 0.0)
        return passed(f"{who} noticed {after:.2f} s after the fault", **measured)

    def _first_of(self, entry: dict[str, Any]) -> tuple[str, float | None]:
        """Who of `by` noticed first, and after how many seconds. None: nobody noticed."""
        if self.by == "job":
            return "the job's own time-out", entry["job"]
        return (
            ("our observers", entry["observers"])
            if self.by == "observers"
            else (entry["who"] or "anybody", entry["after"])
        )

    def _problem(self, run: Record, stall: Stall, entry: dict[str, Any]) -> Finding | None:
        who, after = self._first_of(entry)
        lasted = stall.until_s - stall.since_s
        if after is None:
            if stall.died and self.by != "observers" and self.pattern is None:
                return inconclusive(
                    f"{stall.name} ended after {lasted:.2f} s, when the ranks that it held up died, and no known line "
                    "of the log says why. If the job's own watchdog ended them, give a `pattern` for its log line"
                )
            if self.within is not None and lasted < self.within:
                return inconclusive(
                    f"{stall.name} lasted only {lasted:.2f} s, and {who} may take {self.within:g} s; "
                    f"{let_it_last(run, stall, self.within)}"
                )
            if self.by != "job" and (why := why_unseen(run, stall)):
                return inconclusive(f"{stall.name}: {_UNTOLD}; {why}")
            others = f" (only {entry['who']} did)" if entry["who"] else ""
            return failed(f"{stall.name} was not noticed by {who} in the {lasted:.2f} s that it lasted{others}")
        if self.within is not None and after > self.within:
            return failed(
                f"{stall.name} was noticed by {who} after {after:.2f} s, {after - self.within:.2f} s too late"
            )
        bound, suspected = self.suspected_within, entry["suspected"]
        if bound is not None and suspected is None:
            return failed(f"{stall.name}: our observers suspected nothing")
        if bound is not None and suspected > bound:
            return failed(f"{stall.name} was suspected after {suspected:.2f} s, {suspected - bound:.2f} s too late")
        return None

    def _noticed(self, run: Record, stall: Stall) -> dict[str, Any]:
        """The seconds from the fault until the hang was noticed: by the job or by an observer. None: nobody noticed."""
        job = _first(run, replace(stall, until_s=stall.until_s + stall.died * _LATE_S), self._is_of_the_job)
        ours = _first(run, stall, lambda e: e.kind is Kind.HANG_DECLARED)
        suspected = _first(run, stall, lambda e: e.kind is Kind.HANG_SUSPECTED)
        times = {"the job's own time-out": job, "our observers": ours}
        known = {who: after for who, after in times.items() if after is not None}
        who = min(known, key=lambda name: known[name]) if known else ""
        return {
            "fault": stall.name, "who": who, "after": known.get(who), "job": job, "observers": ours,
            "suspected": suspected,
        }  # fmt: skip

    def _is_of_the_job(self, event: Event) -> bool:
        if event.kind is not Kind.LOG_CAUSE:
            return False
        known = BY_NAME.get(str(event.data["cause"]))
        return known.hang if known else self.pattern is not None and event.data.get("pattern") == self.pattern


def _first(run: Record, stall: Stall, fits: Any) -> float | None:
    found = (event for event in run.beside_steps if fits(event) and stall.since_s <= _at(event) <= stall.until_s)
    return next((_at(event) - stall.since_s for event in found), None)


def _at(event: Event) -> float:
    """The time of the event. A hang is declared before its culprits are known, so the time of the declaration
    counts."""
    return float(event.data.get("declared_s", event.mono_s))


def _false_alarms(run: Record, first_s: float) -> int:
    return sum(event.mono_s < first_s for event in run.of_kind(Kind.HANG_DECLARED))


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
        short = {stall: why for stall in stalls if blamed[stall] is None and (why := too_short(run, stall))}
        unseen = [why for stall in stalls if blamed[stall] is None and (why := why_unseen(run, stall))]
        if unseen and not short:
            return inconclusive(f"{_UNTOLD}; {unseen[0]}")
        unread = [why for stall in stalls if blamed[stall] == frozenset() and (why := why_unread(run, stall))]
        if unread:
            return inconclusive(f"a hang was declared and nobody blamed, since no stacks could be read: {unread[0]}")
        pairs = [(stall.ranks, blamed[stall]) for stall in stalls if stall not in short]
        found = self._score(pairs, "our diagnosis") if pairs else None
        if found and (not short or found.outcome is Outcome.FAILED):
            return found
        stall, why = next(iter(short.items()))
        return inconclusive(f"{stall.name}: {_UNTOLD}; {why}")

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
