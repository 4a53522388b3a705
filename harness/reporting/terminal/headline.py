"""What happened in a run: a sentence for each recovery, its parts as a timeline, and three figures against their
bounds. In the timeline, a part begins when all parts before it have ended. The verdict's reason is printed beside
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torchaos.harness.analysis.ending import died_by_itself, failed_loads, in_words
from torchaos.harness.analysis.hangs import hang_at_end
from torchaos.harness.analysis.hit_targets import Landing, landings, step_in_words
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import numbered, seconds_in_words
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, Recovery, Result, Verdict
from torchaos.harness.reporting.terminal.text import Marks

# For each part of a recovery: what has happened at its end, and what the job did in it.
_WORDS = {
    "felt": ("felt", "until it was felt"), "detected": ("noticed", "noticing it"),
    "torn_down": ("ranks gone", "stopping the ranks"), "rendezvous": ("rendezvous", "rendezvous"),
    "workers_up": ("ranks up", "starting processes"), "imported": ("torch imported", "importing torch"),
    "prepared": ("group begun", "the script before the process group"), "joined": ("group joined", "process group"),
    "set_up": ("load begun", "set-up until the load"), "restored": ("loaded", "loading"),
    "first_step": ("first step", "first step"), "caught_up": ("caught up", "catching up"),
}  # fmt: skip
STRETCHES = {
    "noticing": ("felt", "detected"), "torchelastic": ("torn_down", "rendezvous", "workers_up"),
    "start of the ranks": ("imported", "prepared", "joined", "set_up"), "checkpoint": ("restored",),
    "steps": ("first_step", "caught_up"),
}  # fmt: skip
_WORTH = 0.1  # share of the recovery: a shorter part is not among the longest
_RESTART = ("detected", "torn_down", "rendezvous", "workers_up")


@dataclass(frozen=True)
class Span:
    part: str
    begin_s: float  # since the fault
    end_s: float | None  # None: not seen

    @property
    def took_s(self) -> float:
        return 0.0 if self.end_s is None else max(0.0, self.end_s - self.begin_s)


def spans(parts: Mapping[str, float | None]) -> list[Span]:
    """The parts of a recovery as a timeline. If the job continued without a restart, the parts of a restart are left
    out."""
    if went_on(parts):
        parts = {part: at for part, at in parts.items() if at is not None}
    found, latest = [], 0.0
    for part, at in parts.items():
        found.append(Span(part, latest, at))
        latest = max(latest, at or 0.0)
    return found


def over_in_words(part: str) -> str:
    """What has happened at the end of the part, in a word or two."""
    return _WORDS[part][0] if part in _WORDS else part.replace("_", " ")


def spent_in_words(part: str) -> str:
    """What the job did during the part, such as `start of the ranks`."""
    return _WORDS[part][1] if part in _WORDS else part.replace("_", " ")


def longest(parts: Mapping[str, float | None]) -> list[Span]:
    """The three parts that took most of the time, the longest first. Empty if there is only one part."""
    found = [span for span in spans(parts) if span.end_s is not None]
    whole_s = max((span.end_s or 0.0 for span in found), default=0.0)
    worth = [span for span in found if span.took_s >= _WORTH * whole_s > 0]
    return sorted(worth, key=lambda span: -span.took_s)[:3] if len(found) > 1 else []


def went_on(parts: Mapping[str, float | None]) -> bool:
    """Whether the job caught up without any sign of a restart."""
    return parts.get("caught_up") is not None and all(parts.get(part) is None for part in _RESTART)


def outcome_in_words(recovery: Recovery) -> str:
    """How a recovery ended, such as `caught up after 6.84 s, 5 steps done again`."""
    at, lost = recovery.parts.get("caught_up"), recovery.lost_steps
    if at is None and recovery.cut_off:
        return "not judged, because the run was ended early"
    lasted = "" if recovery.lasted_s is None else f" (the fault itself lasted {seconds_in_words(recovery.lasted_s)})"
    if recovery.unseen:
        return f"later steps of rank {', '.join(map(str, recovery.unseen))} were not seen"
    if at is None and recovery.unplaced:
        return f"when it caught up is not known{lasted}"
    if at is None:
        return f"never caught up{lasted}"
    how = "went on without a restart" if went_on(recovery.parts) else "caught up"
    steps = f"{lost or 'no'} {'step' if lost == 1 else 'steps'} done again"
    again = "steps done again: not known" if lost is None else steps
    return f"{how} after {seconds_in_words(at)}{lasted}, {again}"


def bar(span: Span, whole_s: float, width: int, marks: Marks) -> str:
    """The span as a bar. With half cells in `marks`, it is exact to half a character cell. A span that has ended gets
    at least half a cell."""
    if span.end_s is None:
        return ""
    halves = 2 * width
    begin = min(_scaled(span.begin_s, whole_s, halves), halves - 1)
    end = max(begin + 1, _scaled(span.end_s, whole_s, halves))
    cells = [marks.bar] * (-(-end // 2) - begin // 2)
    if end % 2:
        cells[-1] = marks.bar_ends
    if begin % 2:
        cells[0] = marks.bar_starts
    return " " * (begin // 2) + "".join(cells)


def _scaled(at_s: float, whole_s: float, halves: int) -> int:
    return round(min(1.0, at_s / whole_s) * halves) if whole_s > 0 else 0


_MOST = 3  # the most sentences; a game day has many more faults


@dataclass(frozen=True)
class Gauge:
    """A figure against its bound. `share`: the length of its bar, from 0 to 1; None: no bar. `at`: where the bound is
    on the bar; None: at its end."""

    name: str
    value: str
    bound: str
    state: str  # passed, failed, unbounded (no bound), or unknown
    share: float | None
    at: float | None = None


def failures_first(cases: Sequence[Case]) -> list[Case]:
    """The cases in another order: failed cases, each followed by its consequences; then inconclusive cases; then passed
    cases."""
    order = (Verdict.ERROR, Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED)
    return sorted(cases, key=lambda case: (order.index(case.verdict), case.follows is not None))


def happened(run: Record, result: Result) -> list[str]:
    """A sentence for each fault: about its recovery (only the first few), or that it never landed."""
    pairs = list(zip(landings(run), result.recoveries, strict=False))
    found = [_sentence(run, landing, one, pairs[:number]) for number, (landing, one) in enumerate(pairs)]
    how = "No step was seen." if result.steps is None else f"The job made {_steps(result.steps)}."
    if not found and died_by_itself(run):
        return [f"The job died by itself, before any fault. {how}"]
    found += [
        f"{fault.inject} at {fault.target} never landed; it was planned for: {fault.planned}."
        for fault in result.faults
        if fault.applied is None
    ]
    if not found:
        return [f"No fault was planned. {how}" if not result.faults else f"No fault landed. {how}"]
    left = len(found) - _MOST
    if len(found) > 1:
        found = [f"{number}. {text}" for number, text in enumerate(found[:_MOST], 1)]
    if left > 0:
        found.append(f"And {left} more.")
    if not result.recoveries:
        found.append(how)
    if hang := hang_at_end(run):
        found.append(f"{hang.words[:1].upper()}{hang.words[1:]}.")
    if run.stopped and not run.ended_on_purpose:
        after = "" if result.steps is None else f" after step {result.steps}"
        found.append(f"Then the run was ended{after}: {run.stopped.data['reason']}.")
    return found


def cards(result: Result) -> list[Gauge]:
    """The assertion that failed first, then the figures of `gauges`."""
    failed = [case for case in result.cases if case.verdict is Verdict.FAILED]
    root = next((case for case in failed if case.name == result.decided_by), None)
    if result.verdict is not Verdict.FAILED or root is None:
        return gauges(result)
    more = f"and {len(failed) - 1} more" if len(failed) > 1 else ""
    return [Gauge("failed", root.name.replace("_", " "), more, "failed", None), *gauges(result)]


def gauges(result: Result) -> list[Gauge]:
    """Recovery time, lost steps and lost samples, against the bounds of recovery_time and sample_accounting. Empty if
    no fault landed."""
    if not result.recoveries:
        return []
    time = next((case for case in result.cases if case.name == "recovery_time"), None)
    bound = dict(time.bound) if time else {}
    return [
        _recovery(result.recoveries, _number(bound.get("catch_up"))),
        _lost_steps(result.recoveries, _number(bound.get("lost_steps"))),
        _samples(next((case for case in result.cases if case.name == "sample_accounting"), None)),
    ]


def _sentence(run: Record, landing: Landing, recovery: Recovery, earlier: Sequence[tuple[Landing, Recovery]]) -> str:
    ends = [other.at_s + (one.parts.get("caught_up") or inf) for other, one in earlier]
    if went_on(recovery.parts) and any(landing.at_s < end_s for end_s in ends):
        return f"{_hit(run, landing, recovery.lasted_s)} The job had not yet recovered from the fault before."
    return f"{_hit(run, landing, recovery.lasted_s)}{_came_back(run, landing, recovery)}"


def _hit(run: Record, landing: Landing, lasted_s: float | None) -> str:
    planned = next((fault for fault in run.plan.faults if fault.id == landing.fault), None)
    name = planned.inject if planned else landing.fault
    whom = "the job"
    if landing.ranks:
        whom = f"{numbered('rank', landing.ranks)} of {run.plan.job.world_size}"
    elif planned and planned.target.nodes:
        whom = f"node {', '.join(map(str, planned.target.nodes))} of {run.plan.job.nodes}"
    elif planned and planned.params.get("endpoint"):
        whom = f"the endpoint {planned.params['endpoint']}"
    lasted = "" if lasted_s is None else f" and lasted {seconds_in_words(lasted_s)}"
    return f"{name} hit {whom}{_when(run, landing)}{lasted}."


def _when(run: Record, landing: Landing) -> str:
    hits = [event for event in run.of_kind(Kind.APPLYING) if event.data["fault"] == landing.fault]
    hit = next((event for event in hits if event.mono_s >= landing.at_s), None)
    if hit and (step := step_in_words(run, hit)):
        return f" in {step}" + (f" ({str(phase).replace('_', ' ')})" if (phase := hit.data["phase"]) else "")
    before = run.history.highest_step(before_s=landing.at_s) if run.plan.job.replicas == 1 else None
    return f" after step {before}" if before is not None else ""


def _came_back(run: Record, landing: Landing, recovery: Recovery) -> str:
    at, again = recovery.parts.get("caught_up"), _again(recovery)
    if recovery.unseen:
        return f" The job came to its end, and {outcome_in_words(recovery)}."
    if went_on(recovery.parts):
        return f" The job went on without a restart after {seconds_in_words(at)}{again}."
    after = [attempt for attempt in run.history.attempts if attempt.number > landing.attempt]
    back = next((attempt for attempt in after if attempt.first_step is not None), None)
    if back is None and at is None:
        tried = list(dict.fromkeys(path for attempt in after for path in failed_loads(run, attempt.number)))
        unloaded = f", could not load {in_words(tried)}" if tried else ""
        return f" The ranks were started again{unloaded}, and made no step." if after else " The job did not come back."
    base = back.base if back else None
    where = "" if base is None else " from the beginning" if base == 0 else f" from step {base}"
    came = f" The job was restarted and went on{where}{again}"
    if at is None:
        return f"{came}." if recovery.unplaced else f"{came}, and never caught up."
    return f"{came}. It caught up {seconds_in_words(at)} after the fault."


def _again(recovery: Recovery) -> str:
    return (
        ""
        if recovery.lost_steps is None
        else f", {_steps(recovery.lost_steps) if recovery.lost_steps else 'no step'} done again"
    )


def _recovery(recoveries: Sequence[Recovery], bound: float | None) -> Gauge:
    times = [recovery.parts.get("caught_up") for recovery in recoveries]
    known = [at for at in times if at is not None]
    name = "recovery" if len(times) == 1 else "longest recovery"
    if len(known) < len(times):
        return Gauge(name, "never", "" if bound is None else f"{seconds_in_words(bound)} allowed", "failed", None)
    return against(name, max(known), bound, seconds_in_words)


def _lost_steps(recoveries: Sequence[Recovery], bound: float | None) -> Gauge:
    lost = [recovery.lost_steps for recovery in recoveries]
    name = "steps done again" if len(lost) == 1 else "most steps done again"
    if None in lost:
        return Gauge(name, "not known", "", "unknown", None)
    return against(name, max(one or 0 for one in lost), bound, lambda value: f"{value:g}")


def _samples(case: Case | None) -> Gauge:
    name = "samples skipped / repeated"
    if case is None:
        return Gauge(name, "not known", "the scenario has no sample_accounting", "unknown", None)
    skipped, repeated = _number(case.measured.get("skipped")), _number(case.measured.get("repeated"))
    if case.verdict not in (Verdict.PASSED, Verdict.FAILED) or skipped is None or repeated is None:
        return Gauge(name, "not known", f"sample_accounting {case.verdict.value}", "unknown", None)
    value = f"{skipped:g} / {repeated:g}" if skipped or repeated else "0"
    return Gauge(name, value, "0 allowed", case.verdict.value, 1.0 if case.verdict is Verdict.FAILED else None)


def against(name: str, value: float, bound: float | None, words: Callable[[float], str]) -> Gauge:
    if bound is None:
        return Gauge(name, words(value), "no bound", "unbounded", None)
    state = "passed" if value <= bound else "failed"
    share = min(1.0, value / bound) if value > 0 and bound > 0 else 1.0 if value > 0 else None
    return Gauge(name, words(value), f"{words(bound)} allowed", state, share)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _steps(number: int) -> str:
    return f"{number} {'step' if number == 1 else 'steps'}"
