"""Did the loss go on as if nothing had happened?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torchaos.harness.contracts import Finding, First, Need, What, failed, inconclusive, passed
from torchaos.harness.history import History
from torchaos.harness.judging import agreement
from torchaos.harness.judging.agreement import (
    Difference,
    Steps,
    before,
    differences,
    history_of,
    until,
    untold,
)
from torchaos.harness.judging.causes import likeliest_cause
from torchaos.harness.judging.landings import landings
from torchaos.harness.judging.replicas import absent_in_words, each, why_no_steps
from torchaos.harness.judging.rounding import ROUNDING
from torchaos.harness.judging.teardown import final_step, teardown_aborts
from torchaos.harness.judging.unseen import why_unplaced, why_unseen
from torchaos.harness.record import Record
from torchaos.harness.replicas import records_of

_BLIND = "without a twin, steps that were done only once were compared with nothing"


@dataclass(frozen=True)
class LossContinuity:
    """Losses and learning rates of the history that counts, against the twins: step by step, rank by rank.

    `tolerance` is relative (0.001: a thousandth). Without one, they must be bitwise equal, unless several twins differ
    among themselves: then it is learned from them (see harness/judging/agreement.py). After a change of world size the
    means over the ranks are compared."""

    name: ClassVar[str] = "loss_continuity"
    needs: ClassVar[frozenset[Need]] = frozenset(
        {Need.STEPS, Need.LOSS, Need.SAMPLES, Need.TWIN}  # samples: other samples give other losses
    )

    tolerance: float | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        history = history_of(run, twins)
        if not history.executions:
            return inconclusive(f"no step was seen: {why_unseen(run, 'steps')}")
        if not any(one.loss_seen for one in history.executions):
            return inconclusive(f"no loss was seen: {why_unseen(run, 'loss')}")
        if history.unplaced:
            return inconclusive(why_unplaced(run, history.unplaced))
        if not twins:
            return replace(self._redone(history), bound={"tolerance": self.tolerance or 0.0})
        blind = next((twin for twin in twins if not any(one.loss_seen for one in twin.history.executions)), None)
        if blind:
            return inconclusive(f"the twin's losses were not seen: {why_unseen(blind, 'loss')}")
        allowed, basis = self._allowed(twins)
        finding = _Comparison(run, history, twins, allowed, basis).finding()
        return replace(finding, bound={"tolerance": allowed, "basis": basis})

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """Where all replicas had a part in every step, as without replicas."""
        parts = records_of(run)
        if blind := why_no_steps(parts):
            return blind
        if gone := absent_in_words(parts):
            return inconclusive(
                f"{gone}, on fewer samples than in the twin: from then on neither weights nor losses are the twin's, "
                "and no difference says anything"
            )
        return each(self, run, twins)

    def _allowed(self, twins: Sequence[Record]) -> tuple[float, str]:
        if self.tolerance is not None:
            return self.tolerance, "given"
        noise = agreement.noise(twins)
        if noise > 0:
            return agreement.LEARNED_FACTOR * noise, f"learned from {len(twins)} twins that differ among themselves"
        return 0.0, "bitwise"

    def _redone(self, history: History) -> Finding:
        """Each step that was done again, against its first execution."""
        pairs = history.redone()
        seen = [(old, new) for old, new in pairs if old.loss_seen and new.loss_seen]
        if not seen:
            return inconclusive("there is no twin, and no step was done twice: nothing to compare the losses with")
        for old, new in seen:
            ours, theirs = {new.global_step or 0: {new.rank: new}}, {old.global_step or 0: {old.rank: old}}
            first = next(differences(ours, theirs, self.tolerance or 0.0), None)
            if first:
                every = {one.global_step or 0: {one.rank: one} for one, _new in pairs if one.rank == new.rank}
                again = {one.global_step or 0: {one.rank: one} for _old, one in pairs if one.rank == new.rank}
                cause = likeliest_cause(history, {**again, **ours}, {**every, **theirs}, first)
                return failed(f"{_words(first, 'the first time')} {cause}", _first(first), **_measured(first))
        steps = sorted({new.global_step or 0 for _old, new in seen})
        return passed(
            f"all {len(steps)} steps that were done again ({steps[0]} to {steps[-1]}) gave the losses of the first "
            f"time; {_BLIND}",
            steps=len(steps),
        )


class _Comparison:
    """One run against its twins. What lies before the first fault says whether the twins are any measure for it."""

    def __init__(self, run: Record, history: History, twins: Sequence[Record], allowed: float, basis: str) -> None:
        self._history, self._allowed, self._basis = history, allowed, basis
        self._twins = [until(twin.history.by_step(), final_step(twin)) for twin in twins]
        last = max(self._twins[0], default=0)
        self._done = until(history.by_step(), last if teardown_aborts(run, last) else None)
        self._untold = untold(history, self._done, twins[0].history, self._twins[0])
        self._ours = {step: by_rank for step, by_rank in self._done.items() if step not in self._untold}
        landed = landings(run)
        early = before(history, landed[0].at_s if landed else float("inf"))
        blind = untold(history, early, twins[0].history, self._twins[0])
        self._before = {step: by_rank for step, by_rank in early.items() if step not in blind}

    def finding(self) -> Finding:
        invalid = self._nearest(self._before)
        if invalid:
            return inconclusive(
                f"the twin is no measure for this run: before any fault, {_words(invalid, 'in the twin')} Give the job "
                "a fixed seed, more twins, or a tolerance.",
                **_measured(invalid),
            )
        first = self._nearest(self._ours)
        if first and self._is_rounding():
            return inconclusive(
                f"{_words(first, 'in the twin')} No difference is larger than {ROUNDING:g} of the value, and with "
                "three ranks or more DDP sums in another order after any restart (its buckets are rebuilt after the "
                "first step; find_unused_parameters=True stops that), so this may be rounding. Give a tolerance.",
                **_measured(first),
            )
        if first:
            cause = likeliest_cause(self._history, self._ours, self._twins[0], first)
            return failed(f"{_words(first, 'in the twin')} {cause}", _first(first), **_measured(first))
        return self._gaps() or self._unseen() or self._well()

    def _is_rounding(self) -> bool:
        """Whether another order of summation, which two ranks do not have, could explain all there is."""
        if self._basis != "bitwise" or max(len(by_rank) for by_rank in self._ours.values()) < 3:
            return False
        return all(
            one.what == "loss" and one.relative <= ROUNDING
            for one in differences(self._ours, self._twins[0], self._allowed)
        )

    def _nearest(self, ours: Steps) -> Difference | None:
        """The first difference from the twin that is nearest in that step."""
        by_twin = [
            {(one.step, one.rank, one.what): one for one in differences(ours, twin, self._allowed)}
            for twin in self._twins
        ]
        common = set(by_twin[0]).intersection(*by_twin[1:])
        return next((one for where, one in by_twin[0].items() if where in common), None)

    def _gaps(self) -> Finding | None:
        missing = sorted(self._twins[0].keys() - self._done.keys())
        extra = sorted(self._done.keys() - self._twins[0].keys())
        if missing:
            return failed(
                f"{_steps(missing)} of the twin's never took place: the history that counts ends with step "
                f"{max(self._done, default=0)}",
                First(What.ABSENT, missing[0]),
                missing=len(missing),
            )
        if extra:
            return failed(
                f"{_steps(extra)} took place, and the twin ended with step {max(self._twins[0])}", extra=len(extra)
            )
        return None

    def _unseen(self) -> Finding | None:
        if self._untold:
            return inconclusive(f"not all ranks told of step {min(self._untold)}, here or in the twin")
        for step, by_rank in self._ours.items():
            twins = self._twins[0][step]
            if by_rank.keys() != twins.keys():
                blind = [rank for steps in (by_rank, twins) for rank, one in steps.items() if not one.loss_seen]
            else:  # a step without any backward has no loss, here and there
                pairs = [(rank, one, twins[rank]) for rank, one in by_rank.items() if one.losses or twins[rank].losses]
                blind = [rank for rank, one, other in pairs if not (one.loss_seen and other.loss_seen)]
            if blind:
                return inconclusive(
                    f"the loss of step {step} on rank {blind[0]} was not seen, here or in the twin, though others "
                    "were: the backward hook did not fire in it, or its value was never copied"
                )
        return None

    def _well(self) -> Finding:
        ranks = len({rank for by_rank in self._ours.values() for rank in by_rank})
        where = "1 rank" if ranks == 1 else f"{ranks} ranks"
        how = "bitwise equal to" if not self._allowed else f"within {self._allowed:.3g} of"
        worst = max((one.relative for one in differences(self._ours, self._twins[0], 0.0, 0.0)), default=0.0)
        lines = ", as far as the job's log tells" if self._history.source == "log" else ""
        changed = any(self._ours[step].keys() != self._twins[0][step].keys() for step in self._ours)
        means = "; where the number of ranks differed, the means over the ranks were compared" if changed else ""
        return passed(
            f"the losses of all {len(self._ours)} steps on {where} are {how} the twin's{lines}{means}",
            steps=len(self._ours), ranks=ranks, largest_difference=worst, twins=len(self._twins),
        )  # fmt: skip


def _words(first: Difference, other: str) -> str:
    where = "on average over the ranks" if first.rank is None else f"on rank {first.rank}"
    by = f" (by {first.relative:.2g} of it)" if math.isfinite(first.relative) else ""
    return (
        f"the {first.what} differs first in step {first.step} {where}: {first.ours:.9g} instead of {first.theirs:.9g} "
        f"{other}{by}."
    )


def _first(first: Difference) -> First:
    return First(What(first.what), first.step)


def _measured(first: Difference) -> dict[str, object]:
    return {"step": first.step, "rank": first.rank, "relative_difference": first.relative}


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]})"
