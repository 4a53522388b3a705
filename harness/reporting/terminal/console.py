"""Prints the result of a run on a terminal: first the verdict and its reason, in a few lines, then the evidence, and
where to read more.

`why` explains the verdict in a sentence or two: the root cause, and how many assertions failed. Console, page, card,
summary and annotation all begin with this explanation."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from torchaos.harness.record.plan import counted, last_words_in_words, seconds_in_words
from torchaos.harness.record.redaction import mask
from torchaos.harness.record.result import Case, FaultResult, Recovery, Result, Verdict, root_first, verdicts_in_words
from torchaos.harness.reporting.terminal import headline
from torchaos.harness.reporting.terminal.plan_preview import catalogue as catalogue
from torchaos.harness.reporting.terminal.plan_preview import overview as overview
from torchaos.harness.reporting.terminal.plan_preview import plan as plan
from torchaos.harness.reporting.terminal.plan_preview import ready_scenarios as ready_scenarios
from torchaos.harness.reporting.terminal.plan_preview import summary_of as summary_of
from torchaos.harness.reporting.terminal.plan_preview import warnings as warnings
from torchaos.harness.reporting.terminal.text import (
    COLOURS,
    Pen,
    measured_in_words,
    name_in_words,
    pairs_in_words,
    value_in_words,
)

_END_OF_SENTENCE = re.compile(r"\. (?=[A-Z])")
_SURE = ("most likely", "since only")  # beginnings of causes that already say how sure they are
_VAGUE = ("something", "nothing")  # beginnings of causes that name several possible causes, or none
_MOST_NAMES = 4
_NAME = re.compile(r"[._:/=\d]")  # characters inside a word that make it the name of a file, a fault or the like


class Why(NamedTuple):
    """An explanation of the verdict. Each part is one or more sentences, without the last full stop."""

    lead: str  # the root cause, or the deciding reason if no cause is known
    failures: str  # such as "4 of 12 assertions failed: sample accounting (3 more follow from it)"; may be empty
    more: str  # further sentences of the reason, shortened; may be empty
    log: tuple[str, ...] = ()  # if a job died by itself: the last lines of its log


def why(result: Result) -> Why:
    """Explains the verdict of a result."""
    case = _root(result)
    own = f"{case.name}: {case.reason}" if case else ""
    if case is None or not result.reason.startswith(own):
        return Why(_upper(without_words(result.reason, result)), _count(result), "", result.last_words)
    first = _END_OF_SENTENCE.split(case.reason, maxsplit=1)[0]
    beyond = result.reason.removeprefix(own).removeprefix("; ")
    vague = not case.cause or case.cause.startswith(_VAGUE)
    lead, rest = (first, case.cause) if vague else (_cause(case.cause), first)
    return Why(_upper(lead), _count(result), ". ".join(_upper(text) for text in (rest, beyond) if text))


def without_words(text: str, result: Result) -> str:
    """The text without the last lines of the job's log."""
    return text.replace(last_words_in_words(result.last_words), "") if result.last_words else text


def _root(result: Result) -> Case | None:
    """The case that decided, or the case from which it follows."""
    by_name = {case.name: case for case in result.cases}
    case = by_name.get(result.decided_by)
    return by_name.get(case.follows, case) if case and case.follows else case


def _cause(cause: str) -> str:
    return cause if cause.startswith(_SURE) else f"most likely, {cause}"


def _count(result: Result) -> str:
    """How many assertions did not pass. Empty if no assertion decided."""
    cases = [case for case in result.cases if case.kind == "assertion"]
    bad = [case for case in cases if case.verdict is result.verdict]
    if not bad or not result.decided_by:
        return ""
    of = f"{len(bad)} of {len(cases)} {'assertion' if len(cases) == 1 else 'assertions'}"
    if result.verdict is Verdict.FAILED:
        return f"{of} failed{_failures(bad)}"
    unproved = any(not fault.proved for fault in result.faults)
    return "" if unproved else f"{of} {'is' if len(bad) == 1 else 'are'} inconclusive: {_listed(bad)}"


def _failures(bad: Sequence[Case]) -> str:
    """The names of the failed cases. A case that follows from another case is only counted."""
    after = Counter(str(case.follows) for case in bad if case.follows)
    of_faults = after.pop("faults", 0)
    roots = [case for case in bad if not case.follows]
    of_fault = f"{of_faults} because the fault was not outlived" if of_faults else ""
    names = _listed(roots, after)
    return f": {', and '.join(filter(None, (names, of_fault)))}" if names else " because the fault was not outlived"


def _listed(cases: Sequence[Case], after: Counter[str] | None = None) -> str:
    followers = after or Counter()
    shown = [
        name_in_words(case.name)
        + (f" ({many} more {'follows' if many == 1 else 'follow'} from it)" if (many := followers[case.name]) else "")
        for case in cases[:_MOST_NAMES]
    ]
    left = len(cases) - _MOST_NAMES
    return ", ".join([*shown, *([f"{left} more"] if left > 0 else [])])


def _upper(text: str) -> str:
    """The text with a capital letter and without its full stop. A name at the beginning (`process.kill`, `kill:`,
    `step-20`) keeps its small letter."""
    head = text.split(" ", 1)[0]
    return (text if _NAME.search(head) else text[:1].upper() + text[1:]).rstrip(".")


def _lower(text: str) -> str:
    """The text as a part of a sentence: without a capital letter, unless its first word has more of them (`DDP`)."""
    return text[:1].lower() + text[1:] if text[1:2].islower() or text.startswith("A ") else text


_LABEL = 10  # columns: a label such as "Reproduce"
_MOST = 3  # rows of faults, of failed cases and of notes, and lines of each row


def tell_verdict(pen: Pen, result: Result, most: int = _MOST) -> list[Case]:
    """Prints the verdict, its cause, and each case that did not pass, in at most `most` lines each. Cases that follow
    from another case are left out. Returns the cases that it named beside the cause."""
    told = why(result)
    _headline(pen, result, told)
    others, root = _others(result), _root(result)
    failed = result.verdict is Verdict.FAILED and root is not None and bool(told.failures)
    if root is None or not failed:
        for text in filter(None, (told.failures, told.more)):
            pen.row([], pen.text(f"{text}."), indent=1, most=most)
    elif root.kind == "faults":
        pen.row([(pen.mark(root.verdict), 1)], pen.text(told.failures), indent=3, most=most)
    else:
        _failed(pen, root, told.more, result, most)
    for case in others[:_MOST]:
        _failed(pen, case, case.reason, result, most)
    if len(others) > _MOST:
        pen.row([(pen.mark(result.verdict), 1)], pen.text(_listed(others[_MOST:])), indent=3, most=1)
    return others


def brief(result: Result, console: Console, report: Path | None = None) -> None:
    """Prints the result in about 15 lines, without repetitions. `report`: the path of its page."""
    pen = Pen(console)
    others = tell_verdict(pen, result)
    for fault, words in [*_faults(result)][:_MOST]:
        title = pen.text(f"{fault.inject} {pen.marks.arrow} {fault.target}:")
        pen.row([(pen.mark(fault.verdict), 1), (title, title.cell_len)], pen.text(words), indent=3, most=_MOST)
    for verdict in (Verdict.INCONCLUSIVE, Verdict.PASSED):
        names = [name_in_words(case.name) for case in result.cases if case.verdict is verdict and case not in others]
        if names and result.steps is not None and (verdict is not result.verdict or verdict is Verdict.PASSED):
            pen.row([(pen.mark(verdict), 1)], pen.text(", ".join(names), "dim"), indent=3, most=2)
    for note in [note for note in result.notes if note not in result.reason][:_MOST]:
        pen.row([(pen.text("note", "dim"), 4)], pen.text(note), indent=3, most=2)
    more = f"torchaos judge -v {shlex.quote(result.run_dir)}" if result.run_dir else ""
    again = "" if result.verdict is Verdict.PASSED else mask(result.reproduce)
    pen.gap()
    for label, text in (("Report", str(report or "")), ("More", more), ("Reproduce", again)):
        if text:
            pen.long_line(pen.text(label, "dim"), _LABEL, text)
    pen.gap()


def _headline(pen: Pen, result: Result, told: Why) -> None:
    """Prints the verdict and its reason, never shortened: the decisive word may be the last."""
    about = f"seed {result.seed}, {seconds_in_words(result.duration_s)}"
    pen.banner(result.verdict.value.upper(), COLOURS[result.verdict], result.scenario, about)
    pen.row([], pen.text(f"{told.lead}.", "bold"), indent=1)
    for line in told.log:
        pen.row([(pen.text("|", "dim"), 1)], pen.text(line), indent=3)
    undone = [case for case in result.cases if case.kind == "rollback" and case.verdict is not Verdict.PASSED]
    if undone and result.verdict is not Verdict.ERROR:
        pen.row([], pen.text(f"rollback incomplete: {undone[0].reason}", "bold red"), indent=1)


def _failed(pen: Pen, case: Case, reason: str, result: Result, most: int) -> None:
    """Prints a case that did not pass, without the words of the headline, and then the cases that follow from it."""
    after = [name_in_words(other.name) for other in result.cases if other.follows == case.name]
    follows = f"{', '.join(after)} {'follows' if len(after) == 1 else 'follow'} from it" if after else ""
    text = "; ".join(filter(None, (_lower(reason), follows)))
    name = pen.text(f"{name_in_words(case.name)}{':' if text else ''}", "bold")
    pen.row([(pen.mark(case.verdict), 1), (name, name.cell_len)], pen.text(text), indent=3, most=most)


def _faults(result: Result) -> Iterator[tuple[FaultResult, str]]:
    """The faults that landed, and those of which the reason does not say why they did not; each with a text about its
    end."""
    for fault in result.faults:
        ends = [headline.outcome_in_words(one) for one in result.recoveries if one.fault == fault.id]
        if ends:
            yield fault, ends[-1] if fault.proved or fault.reason in result.reason else fault.reason
        elif fault.applied or (fault.reason not in result.reason and result.steps is not None):
            yield fault, "landed" if fault.proved else fault.reason


def _others(result: Result) -> list[Case]:
    """The cases with the run's verdict that the headline does not explain, and in an inconclusive run those that
    failed. Empty if no step was seen, because all cases have this one cause then."""
    if result.steps is None:
        return []
    found: dict[str, Case] = {}
    for case in root_first(result.cases):
        said = case.name == result.decided_by or case.follows or case.kind == "faults" or case.reason in result.reason
        with_verdict = case.verdict is result.verdict and bool(result.decided_by)
        if (with_verdict or (case.verdict is Verdict.FAILED is not result.verdict)) and not said:
            found.setdefault(case.reason, case)
    return [*found.values()]


_FACT_LABEL, _PART = 10, 15  # columns: for a label such as "rollback"; for the name of a part of a recovery
_LONGEST_BAR, _LONGEST_NAME = 60, 28


def show(result: Result, console: Console, report: Path | None = None, *, whole: bool = True) -> None:
    """Prints the facts of one scenario; if `whole` is false, only the important ones. Readable at 80 columns, without
    colour, and in ASCII. `report`: the path of its page."""
    if whole:
        _whole(result, console, report)
    else:
        brief(result, console, report)


def _whole(result: Result, console: Console, report: Path | None) -> None:
    pen = Pen(console)
    told = why(result)
    _headline(pen, result, told)
    for text in filter(None, (told.failures, told.more)):
        pen.row([], pen.text(f"{text}."), indent=1)
    if result.description:
        pen.gap()
        pen.row([], pen.text(result.description, "dim"), indent=1)
    if result.faults:
        pen.heading("Faults")
        for fault in result.faults:
            _fault(pen, fault)
    for recovery in result.recoveries:
        _recovery(pen, recovery)
    if result.cases:
        pen.heading("Verdicts")
        width = 1 + min(_LONGEST_NAME, max(len(name_in_words(case.name)) for case in result.cases))
        for case in _folded([replace(one, reason=without_words(one.reason, result)) for one in result.cases]):
            _case(pen, case, width)
    if result.notes:
        pen.heading("Notes")
        for note in result.notes:
            pen.row([(pen.text(pen.marks.dot, "dim"), 1)], pen.text(note), indent=3)
    _footer(pen, result, report)
    pen.gap()


def _fault(pen: Pen, fault: FaultResult) -> None:
    title = pen.text(f"{fault.inject} {pen.marks.arrow} {fault.target}", "bold")
    if fault.id != fault.inject:
        title.append("  ").append_text(pen.text(fault.id, "dim"))
    pen.row([(pen.mark(fault.verdict), 1)], title, indent=3)
    rows = {
        "planned": fault.planned,
        "applied": fault.applied or "never",
        "evidence": fault.evidence or "none that it was felt",
        "rollback": fault.rollback,
    }
    if fault.imitates:
        rows["synthetic"] = f"it imitates {fault.imitates}"
    if fault.replays:
        rows["replayed"] = f"it says again what {fault.replays} said"
    if fault.measured:
        rows["measured"] = measured_in_words(fault.measured)
    if fault.verdict is not Verdict.PASSED:
        rows["verdict"] = f"{fault.verdict.value}: {fault.reason}"
    for label, text in rows.items():
        pen.row([(pen.text(label, "dim"), _FACT_LABEL)], pen.text(text), indent=5)


def _recovery(pen: Pen, recovery: Recovery) -> None:
    whole = max((at for at in recovery.parts.values() if at is not None), default=0.0)
    pen.heading("Recovery", f"from {recovery.fault}: {headline.outcome_in_words(recovery)}")
    found = headline.spans(recovery.parts)
    slowest = max(found, key=lambda span: span.took_s, default=None)
    width = min(_LONGEST_BAR, pen.width - 31 - _PART)
    for span in found:
        emphasis = "bold" if span is slowest and span.took_s > 0 else ""
        name = pen.text(headline.over_in_words(span.part), emphasis)
        if span.end_s is None:
            pen.row([(name, _PART)], Text("  not seen", "dim"), indent=3)
            continue
        at = Text(f"{seconds_in_words(span.end_s):>10}", emphasis)
        took = Text(f"{'+' + seconds_in_words(span.took_s):>11}", "dim")
        bar = Text(headline.bar(span, whole, width, pen.marks), "bold cyan" if emphasis else "cyan")
        pen.row([(name, _PART), (at, 10), (took, 12)], bar, indent=3)
    if most := headline.longest(recovery.parts):
        told = ", ".join(f"{headline.spent_in_words(one.part)} {100 * one.took_s / whole:.0f} %" for one in most)
        pen.row([], pen.text(f"Most of it: {told}"), indent=3)
    for text in recovery.advice:
        pen.row([(pen.text(pen.marks.dot, "dim"), 1)], pen.text(text), indent=3)


def _case(pen: Pen, case: Case, width: int) -> None:
    name = pen.text(name_in_words(case.name), "" if case.verdict is Verdict.PASSED else "bold")
    pen.row([(pen.mark(case.verdict), 1), (name, width)], pen.text(case.full_reason), indent=3)
    if figures := against(case):
        pen.row([(Text(), 1), (Text(), width)], pen.text(figures, "dim"), indent=3)


def _folded(cases: Sequence[Case]) -> list[Case]:
    """The cases in the order of reports. Cases that are inconclusive for the same reason become one."""
    found: dict[object, Case] = {}
    for case in root_first(cases):
        blind = case.verdict is Verdict.INCONCLUSIVE and not case.measured
        key: object = case.reason if blind else case.name
        same = found.get(key)
        found[key] = replace(same, name=f"{same.name}, {case.name}", bound={}) if same else case
    return [*found.values()]


def against(case: Case) -> str:
    """The measured values with their bounds. If the case passed, only values with a bound."""
    both = {name: bound for name, bound in case.bound.items() if name in case.measured}
    parts = [
        f"{name_in_words(name)} {value_in_words(name, case.measured[name], case.seconds)} "
        f"(bound {value_in_words(name, bound, case.seconds)})"
        for name, bound in both.items()
    ]
    bounds = {name: bound for name, bound in case.bound.items() if name not in both}
    parts += [f"bound: {pairs_in_words(bounds, case.seconds)}"] if bounds else []
    rest = {name: value for name, value in case.measured.items() if name not in both and value is not None}
    parts += [f"measured: {pairs_in_words(rest, case.seconds)}"] if rest and case.verdict is not Verdict.PASSED else []
    return "; ".join(parts)


def _footer(pen: Pen, result: Result, report: Path | None) -> None:
    pen.gap()
    attempts = f"{result.attempts} {'attempt' if result.attempts == 1 else 'attempts'}"
    steps = "no step was seen" if result.steps is None else counted(result.steps, "step")
    about = {
        "Job": f"{steps}, {attempts}" if result.attempts else "",
        "Twin": result.twin,
        "Versions": ", ".join(f"{name} {version}" for name, version in result.versions.items() if version),
    }
    for label, text in about.items():
        if text:
            pen.row([(pen.text(label, "dim"), _FACT_LABEL)], pen.text(text))
    lines = {
        "Files": result.run_dir,
        "Report": str(report or ""),
        "Reproduce": mask(result.reproduce),
    }
    for label, text in lines.items():
        if text:
            pen.long_line(pen.text(label, "dim"), _FACT_LABEL, text)


def summary(results: Sequence[Result], console: Console) -> None:
    """Prints a line for each scenario."""
    pen = Pen(console)
    name_width = 1 + min(_LONGEST_NAME, max((len(result.scenario) for result in results), default=0))
    pen.heading("Summary")
    head = [("", 1), ("scenario", name_width), ("seed", 6), ("time", 8), ("caught up", 10), ("lost", 5)]
    pen.row([(Text(title, "dim"), width) for title, width in head], Text("verdict", "dim"))
    for result in results:
        caught = [recovery.parts.get("caught_up") for recovery in result.recoveries]
        lost = [recovery.lost_steps for recovery in result.recoveries]
        cells = [
            (pen.mark(result.verdict), 1),
            (pen.text(result.scenario), name_width),
            (pen.text(result.seed), 6),
            (pen.text(seconds_in_words(result.duration_s)), 8),
            (pen.text(_most(caught, "never", seconds_in_words)), 10),
            (pen.text(_most(lost, "?", str)), 5),
        ]
        pen.row(cells, pen.text(result.verdict.value, COLOURS[result.verdict]))
    told = verdicts_in_words(result.verdict for result in results)
    pen.gap()
    pen.row([], pen.text(f"{counted(len(results), 'run')}: {told}", "bold"))
    pen.gap()


def _most(values: Sequence[float | None], unknown: str, words: Callable[[float], str]) -> str:
    """The largest of the values, in words. The text `unknown` if one of them is unknown."""
    known = [value for value in values if value is not None]
    return "" if not values else unknown if len(known) < len(values) else words(max(known))
