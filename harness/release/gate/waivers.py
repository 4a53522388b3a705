"""Applies waivers, and decides when a waiver itself closes the gate. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from torchaos.harness.record.result import Case, Verdict
from torchaos.harness.release.gate.grammar import Waiver

_WAIVED = ", waived"  # added to the name of a waived case, for reports that show only names


@dataclass(frozen=True)
class Waived:
    """A case after a waiver was applied. `said`: its verdict before the waiver."""

    case: Case
    said: Verdict


def apply(waiver: Waiver | None, variants: Sequence[Case]) -> Waived:
    """Applies a waiver to the verdicts of one case: the stored verdict, and the verdict under each set of bounds. The
    worst verdict counts. The waiver must cover every verdict that is not passed."""
    red = [case for case in variants if case.verdict is not Verdict.PASSED]
    if not red:
        return Waived(variants[-1], Verdict.PASSED)
    worst = min(red, key=lambda one: _SEVERITY.index(one.verdict))
    if waiver is None:
        return Waived(worst, worst.verdict)
    bare = [case for case in red if case.verdict.value not in waiver.covers]
    if bare:
        worst = min(bare, key=lambda one: _SEVERITY.index(one.verdict))
        told = f"{worst.reason} (waiver {waiver.ticket} covers only what {' or '.join(waiver.covers)})"
        return Waived(_with(worst, worst.name, worst.verdict, told), worst.verdict)
    told = f"{worst.verdict.value}, and waived until {waiver.expires} ({waiver.ticket}): {worst.reason}"
    return Waived(_with(worst, worst.name + _WAIVED, Verdict.PASSED, told), worst.verdict)


def state(waiver: Waiver, said: Sequence[Verdict], today: date) -> Case:
    """The case of the waiver itself. `said`: the verdicts of its assertion in each run that counts as evidence, before
    any waiver."""
    name, about = f"{waiver.scenario}: {waiver.assertion}", f"{waiver.ticket}: {waiver.reason}"
    passes = bool(said) and all(verdict is Verdict.PASSED for verdict in said)
    if expired(waiver, today):
        again = "repair the job, or write a later day under `expires`"
        what = f"{waiver.assertion} passes: remove the waiver" if passes else again
        told = f"this waiver no longer counts, it expired on {waiver.expires}; {what} ({about})"
        return _case(name, Verdict.FAILED, told)
    if passes:
        return _case(name, Verdict.FAILED, f"{waiver.assertion} passes: remove the waiver ({about})")
    left = (waiver.expires - today).days
    holds = "today is its last day" if left == 0 else f"{left} {'day is' if left == 1 else 'days are'} left"
    return _case(name, Verdict.PASSED, f"{holds}, until {waiver.expires} ({about})")


def is_waived(case: Case) -> bool:
    return case.name.endswith(_WAIVED)


def expired(waiver: Waiver, today: date) -> bool:
    return today > waiver.expires


def in_force(waivers: Sequence[Waiver], scenario: str, today: date) -> Mapping[str, Waiver]:
    """The waivers that are valid today, by assertion."""
    return {
        waiver.assertion: waiver for waiver in waivers if waiver.scenario == scenario and not expired(waiver, today)
    }


_SEVERITY = (Verdict.ERROR, Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED)


def _case(name: str, verdict: Verdict, reason: str) -> Case:
    return Case(name, "assertion", verdict, reason)


def _with(case: Case, name: str, verdict: Verdict, reason: str) -> Case:
    return Case(name, case.kind, verdict, reason, case.measured, case.bound, case.seconds)
