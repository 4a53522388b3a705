"""Failures of forked ranks. They only make a state suspected: a failure counts when a cold start has shown it. Cold
starts take much longer, so they are made where they say most."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torchaos.harness.crash_explorer.resume_outcomes import Class, Outcome

SHOWN = (
    "failures without a cold start of their own: forked ranks failed in the same way and with the same words as in a "
    "state whose cold start has shown the failure"
)


def is_suspected(outcome: Outcome) -> bool:
    """Whether only forked ranks have failed from this state."""
    return outcome.warm and outcome.kind is not Class.RIGHT and not outcome.shown_by


def shown(found: Outcome, before: Iterable[Outcome]) -> Outcome:
    """The same outcome, which counts if forked ranks had failed like this before, with the same words, and a cold start
    has shown that failure too."""
    if not is_suspected(found) or not found.printed:
        return found
    shown = (one for one in before if not one.warm and not one.like and one.printed == found.printed)
    other = next((one for one in shown if failure(one) == failure(found)), None)
    return replace(found, shown_by=other.state) if other else found


def failure(outcome: Outcome) -> tuple[str, ...]:
    """What failed, without numbers."""
    return outcome.kind, outcome.assertion, re.sub(r"\d+", "", outcome.reason)


def may_pay(suspected: Outcome, before: Collection[Outcome]) -> bool:
    """Whether a cold start at once may save resumes or cold starts: the failure came before the first step, and cold
    starts of such failures have stood for at least as many other states."""
    same = [outcome for outcome in before if not outcome.warm and failure(outcome) == failure(suspected)]
    again = [outcome for outcome in before if outcome.shown_by and failure(outcome) == failure(suspected)]
    saved = len(again) + sum(bool(outcome.like) for outcome in same)
    return suspected.from_step is None and 2 * saved >= len(same)


def each_kind_first(outcomes: Sequence[Outcome], confirmed: Collection[Class]) -> list[Outcome]:
    """The same outcomes: first one of each class that is not confirmed, then one of each kind of failure, then a second
    one of each, and so on."""
    seen, classes = Counter[tuple[str, ...]](), {*confirmed}
    rounds: list[tuple[int, Outcome]] = []
    for outcome in outcomes:
        kind = failure(outcome)
        rounds.append((seen[kind] if outcome.kind in classes else -1, outcome))
        classes.add(outcome.kind)
        seen[kind] += 1
    return [outcome for _round, outcome in sorted(rounds, key=lambda pair: pair[0])]
