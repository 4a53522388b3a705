"""Finds the failures that follow from another failure, by the quantity that differed first and its step. Pure.

A second defect may be hidden by a consequence of the first: correct the cause and run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchaos.harness.contracts import Finding, First, What
from torchaos.harness.record.result import Case, Verdict

# The least number of steps by which a consequence comes later. Step 11 computes its loss from its samples and from the
# parameters after step 10. Its update then makes the parameters after step 11, which the checkpoint of step 11 holds.
# Samples that the job computes come from the parameters after the step before.
_INPUTS = {What.SAMPLES: 0, What.COMPUTED: 0}
_LATER = {
    What.SAMPLES: {What.LOSSES: 0},
    What.COMPUTED: {
        What.LOSSES: 0, What.LOSS: 1, What.RATE: 1, What.PARAMETERS: 1, What.REPLICAS: 1, What.LOADED: 1,
    },
    What.LOSS: {**_INPUTS, What.RATE: 1, What.PARAMETERS: 1, What.REPLICAS: 1, What.LOADED: 1},
    What.PARAMETERS: {
        **_INPUTS, What.LOSSES: 0, What.LOSS: 0, What.RATE: 0, What.PARAMETERS: 1, What.REPLICAS: 1, What.LOADED: 1,
    },
    What.REPLICAS: {What.REPLICAS: 1},
    What.SAVED: {
        **_INPUTS, What.LOSSES: 0, What.LOSS: 0, What.RATE: 0, What.PARAMETERS: 0, What.REPLICAS: 0, What.LOADED: 1,
    },
}  # fmt: skip


def linked(cases: Sequence[Case], findings: Sequence[Finding], faults: Sequence[Case] = ()) -> list[Case]:
    """The cases of the assertions, each failed case with the failed case from which it follows, and each case that
    lacks a landed fault with the case of the faults. `faults`: the case of the faults, if there is one."""
    firsts = [
        finding.first if case.verdict is Verdict.FAILED else None for case, finding in zip(cases, findings, strict=True)
    ]
    fallen = next((case.name for case in faults if case.verdict is Verdict.FAILED), None)
    unproved = next((case.name for case in faults if case.verdict is Verdict.INCONCLUSIVE), None)
    unhit = [finding.first is not None and finding.first.what is What.UNHIT for finding in findings]
    return [
        replace(case, follows=unproved if unhit[place] else _root(place, cases, firsts, fallen))
        for place, case in enumerate(cases)
    ]


def _root(place: int, cases: Sequence[Case], firsts: Sequence[First | None], fallen: str | None) -> str | None:
    own = firsts[place]
    if own is None:
        return None
    if fallen and own.what in (What.ENDING, What.ABSENT):
        return fallen
    causes = [at for at, other in enumerate(firsts) if other and _comes_of((own, place), (other, at))]
    if not causes:
        return None
    earliest = min(causes, key=lambda at: (firsts[at] or own).step)
    return _root(earliest, cases, firsts, fallen) or cases[earliest].name


def _comes_of(ours: tuple[First, int], theirs: tuple[First, int]) -> bool:
    """Whether the first failure follows from the second. Each failure comes with its place in the scenario: if neither
    is earlier in the run, the first place in the scenario is the cause."""
    (own, place), (other, at) = ours, theirs
    if own == other:
        return at < place
    if own.what is What.ABSENT:
        return other.what is What.ENDING
    later = _LATER.get(own.what, {}).get(other.what)
    return later is not None and own.step >= other.step + later
