"""Who noticed that a job hung, and how fast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torchaos.harness.analysis.hangs import Stall, stalls_of, why_unseen
from torchaos.harness.interfaces import Finding, Need, failed, inconclusive, passed, unhit
from torchaos.harness.monitoring.probes.known_failures import BY_NAME
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record

_LATE_S = 1.0  # seconds after the death of a rank in which a log line of the rank may still come


@dataclass(frozen=True)
class HangReaction:
    """Who noticed the stalls of a run. `by`: who must notice them. `within`, `suspected_within`: seconds from the
    fault. `pattern`: of the job's own log line."""

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
        """Which of those in `by` noticed first, and after how many seconds. None: nobody noticed."""
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
                    f"{stall.name} lasted only {lasted:.2f} s, less than the time that {who} may take; make "
                    "the fault longer"
                )
            if self.by != "job" and (why := why_unseen(run, stall)):
                return inconclusive(f"{stall.name}: our observers could not tell whether the job hung; {why}")
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
        """The seconds from the fault until the job or an observer noticed it. None: nobody noticed."""
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
