"""Prints the result of a run in a few lines: the verdict and its cause, what else failed, and where to read more."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from torchaos.harness.record.plan import last_words_in_words, seconds_in_words
from torchaos.harness.record.result import Case, FaultResult, Result, Verdict, root_first
from torchaos.harness.record.secrecy import mask
from torchaos.harness.reporting.terminal import recovery_timeline
from torchaos.harness.reporting.terminal.text import COLOURS, Pen, name_in_words

# Why the verdict is what it is: one sentence with the root cause, and how many assertions failed. Console, page, card,
# summary and annotation begin with these words.

_END_OF_SENTENCE = re.compile(r"\. (?=[A-Z])")
_SURE = ("most likely", "since only")  # how a cause begins that says by itself how sure it is
_VAGUE = ("something", "nothing")  # how a cause begins that names several possible causes, or none
_MOST_NAMES = 4
_NAME = re.compile(r"[._:/=\d]")  # in a word: it is the name of a file, a fault or the like


class Why(NamedTuple):
    """Each part is one or more sentences, without the last full stop."""

    lead: str  # the root cause, or the deciding reason if no cause is known
    failures: str  # such as "4 of 12 assertions failed: sample accounting (3 more follow from it)"; may be empty
    more: str  # what else the reason says in short; may be empty
    log: tuple[str, ...] = ()  # the last lines of the log of a job that died by itself


def why(result: Result) -> Why:
    """The words about a result."""
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
    """The text with a capital letter, unless it begins with a name (`process.kill`, `kill:`, `step-20`); without its
    full stop."""
    head = text.split(" ", 1)[0]
    return (text if _NAME.search(head) else text[:1].upper() + text[1:]).rstrip(".")


# Prints the result of a run in a few lines: the verdict and its cause, what else failed, and where to read more.

_LABEL = 10  # columns: a label such as "Reproduce"
_MOST = 3  # rows of faults, of failed cases and of notes


def brief(result: Result, console: Console, report: Path | None = None) -> None:
    """Prints the result in about 15 lines; no thing is said twice. `report`: the path of its page."""
    pen = Pen(console)
    headline(pen, result, most=4)
    for fault, words in [*_faults(result)][:_MOST]:
        title = pen.text(f"{fault.inject} {pen.marks.arrow} {fault.target}:")
        pen.row([(pen.mark(fault.verdict), 1), (title, title.cell_len)], pen.text(words), indent=3, most=1)
    others = _others(result)
    for case in others[:_MOST]:
        name = pen.text(f"{name_in_words(case.name)}:", "bold")
        pen.row([(pen.mark(case.verdict), 1), (name, name.cell_len)], pen.text(case.reason), indent=3, most=2)
    for verdict in (Verdict.INCONCLUSIVE, Verdict.PASSED):
        names = [name_in_words(case.name) for case in result.cases if case.verdict is verdict and case not in others]
        if names and result.steps is not None and (verdict is not result.verdict or verdict is Verdict.PASSED):
            pen.row([(pen.mark(verdict), 1)], pen.text(", ".join(names), "dim"), indent=3, most=2)
    for note in [note for note in result.notes if note not in result.reason][:_MOST]:
        pen.row([(pen.text("note", "dim"), 4)], pen.text(note), indent=3, most=1)
    more = f"torchaos judge -v {shlex.quote(result.run_dir)}" if result.run_dir else ""
    again = "" if result.verdict is Verdict.PASSED else mask(result.reproduce)
    pen.gap()
    for label, text in (("Report", str(report or "")), ("More", more), ("Reproduce", again)):
        if text:
            pen.long_line(pen.text(label, "dim"), _LABEL, text)
    pen.gap()


def headline(pen: Pen, result: Result, most: int = 0) -> None:
    """Prints the verdict and its reason. `most`: the most lines of each sentence; 0: no limit."""
    badge = Text(f" {result.verdict.value.upper()} ", f"bold reverse {COLOURS[result.verdict]}")
    about = f"seed {result.seed}, {seconds_in_words(result.duration_s)}"
    pen.gap()
    name = pen.text(result.scenario, "bold")
    pen.row([(badge, badge.cell_len), (name, name.cell_len + 1)], pen.text(about, "dim"), indent=0)
    told = why(result)
    pen.row([], pen.text(f"{told.lead}.", "bold"), indent=1, most=most)
    for line in told.log:
        pen.row([(pen.text("|", "dim"), 1)], pen.text(line), indent=3, most=most)
    for text in filter(None, (told.failures, told.more)):
        pen.row([], pen.text(f"{text}."), indent=1, most=most)
    undone = [case for case in result.cases if case.kind == "rollback" and case.verdict is not Verdict.PASSED]
    if undone and result.verdict is not Verdict.ERROR:
        pen.row([], pen.text(f"rollback incomplete: {undone[0].reason}", "bold red"), indent=1)


def _faults(result: Result) -> Iterator[tuple[FaultResult, str]]:
    """The faults that landed, or that the reason does not explain, each with how it ended."""
    for fault in result.faults:
        ends = [recovery_timeline.outcome_in_words(one) for one in result.recoveries if one.fault == fault.id]
        if ends:
            yield fault, ends[-1] if fault.proved or fault.reason in result.reason else fault.reason
        elif fault.applied or (fault.reason not in result.reason and result.steps is not None):
            yield fault, "landed" if fault.proved else fault.reason


def _others(result: Result) -> list[Case]:
    """The cases with the verdict of the run that the headline does not explain. Without a step, all have one cause."""
    if not result.decided_by or result.steps is None:
        return []
    found: dict[str, Case] = {}
    for case in root_first(result.cases):
        said = case.name == result.decided_by or case.follows or case.kind == "faults" or case.reason in result.reason
        if case.verdict is result.verdict and not said:
            found.setdefault(case.reason, case)
    return [*found.values()]
