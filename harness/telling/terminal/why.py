"""Why the verdict is what it is: one sentence with the root cause, and how many assertions failed. Console, page, card,
summary and annotation begin with these words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torchaos.harness.record.result import Case, Result, Verdict
from torchaos.harness.record.words import last_words_in_words
from torchaos.harness.telling.terminal.text import name_in_words

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
