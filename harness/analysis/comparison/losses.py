"""Compares the losses of a run with those of its twins, step by step, and makes the finding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import (
    OTHER_WORLD,
    Difference,
    before,
    differences,
    uneven,
    unreported,
    until,
    without_losses,
)
from torchaos.harness.analysis.comparison.causes import Cause, likeliest_cause
from torchaos.harness.analysis.comparison.sample_counts import with_losses_by_samples, with_losses_of_whole_batches
from torchaos.harness.analysis.comparison.step_facts import is_scaled
from torchaos.harness.analysis.ending import final_step, own_exit_code, teardown_aborts
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.tolerance import (
    CAP,
    CERTAIN,
    LEARNED_FACTOR,
    LOSS,
    ROUNDING,
    Steps,
    Tolerance,
    Tolerances,
    but_for_rounding,
    certainly_beyond,
    distances,
    may_be_rounding,
    rounded_from,
)
from torchaos.harness.interfaces import Finding, First, Outcome, What, failed, inconclusive, passed
from torchaos.harness.record.history import History, StepTable
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Both
from torchaos.harness.record.steps.columns import lengths


def without_data(*tables: StepTable) -> set[int]:
    """The ranks that have neither a loss nor a sample in any step of these runs: the middle stages of a pipeline."""
    seen = set[int]().union(*(table.executions.at(table.executions.column("in_samples") > 0).ranks for table in tables))
    return without_losses(*tables) - seen


def apart_before(run: Record, history: History, twins: Sequence[Record], tolerance: float | None) -> Difference | None:
    """The first certain difference between the run and its twins before the first fault. With such a difference, the
    twins can't be used to judge the run. None if there is no such difference. If no tolerance is given, it is learned
    only from the steps before the fault."""
    theirs, landed = _steps_of(twins), landings(run)
    early = before(history, landed[0].at_s if landed else float("inf"))
    blind = unreported(history, early, twins[0].history, theirs[0])
    early = early.without(blind)
    if tolerance is None:
        limits = Tolerances.learned(theirs, max(early, default=0))
    else:
        limits = Tolerances.given(tolerance, LOSS.typical(theirs))
    return next(iter(_from_all(early, theirs, limits, CERTAIN)), None)


class Comparison:
    """Compares the losses of a run with those of its twins. The steps before the first fault show whether the twins can
    be used to judge the run."""

    def __init__(self, run: Record, history: History, twins: Sequence[Record], tolerance: float | None) -> None:
        self._run, self._history, self._twins, self._twin = run, history, _steps_of(twins), twins[0]
        self._invalid = apart_before(run, history, twins, tolerance)
        last = max(self._twins[0], default=0)
        self._done = until(history.by_step(), last if teardown_aborts(run, last) else None)
        self._unreported = unreported(history, self._done, twins[0].history, self._twins[0])
        self._ours, self._moved = with_losses_by_samples(self._done.without(self._unreported), self._twins[0])
        if tolerance is None:
            self._limits, self._divided = Tolerances.learned(self._twins), list[int]()
        else:
            self._limits = Tolerances.given(tolerance, LOSS.typical(self._twins))
            self._ours, self._divided = with_losses_of_whole_batches(self._ours, self._twins[0], tolerance)

    @property
    def _loss(self) -> Tolerance:
        return self._limits.loss

    @property
    def bound(self) -> dict[str, object]:
        """The largest tolerance of all steps, and its source."""
        basis: str = self._loss.basis
        if basis == "learned":
            basis = f"learned from {len(self._twins)} twins that differ from each other"
        return {"tolerance": self._loss.largest, "basis": basis}

    def finding(self) -> Finding:
        """The finding about the losses. Inconclusive if the twins can't be used to judge the run."""
        if invalid := self._invalid:
            return inconclusive(
                f"the twin can't be compared with this run: before any fault, {in_words(invalid, 'in the twin')} Give "
                "the job a fixed seed, more twins, or a tolerance.",
                **measured_of(invalid),
            )
        return self._different() or self._gaps() or self._unseen() or self._too_noisy() or self._well()

    @property
    def are_clear(self) -> bool:
        """Whether it is known if the losses agree or not."""
        return self.first is not None or self.finding().outcome is not Outcome.INCONCLUSIVE

    @cached_property
    def first(self) -> Difference | None:
        """The first difference that neither rounding nor the noise between the twins explains. None if there is no such
        difference. Noise only explains differences of the loss of a rank, and only if they are too small or in too few
        steps to be certain."""
        learned = self._loss.basis == "learned"
        found = _from_all(self._ours, self._twins, self._limits, CERTAIN if learned else LEARNED_FACTOR)
        if not any(map(_of_a_rank, found)):
            return next(iter(found), None)
        since = math.inf if self._rounded is not None else 0
        if learned:
            certain = certainly_beyond(self._distances(self._twins), self._loss)
            since = math.inf if certain is None else certain
        return next((each for each in found if not _of_a_rank(each) or each.step >= since), None)

    @cached_property
    def _rounded(self) -> bool | None:
        """Whether rounding explains the differences from a twin; see `may_be_rounding`."""
        bitwise = self._loss.basis == "bitwise"
        return may_be_rounding(self._distances(self._twins[:1]), self._history) if bitwise else None

    def _different(self) -> Finding | None:
        """The finding about a difference that neither noise nor rounding explains, or that rounding may explain."""
        if self.first:
            spread = self._loss.spreads.get(self.first.step, 0.0)
            noisy = self._loss.basis == "learned" and self.first.what == "loss"
            more = f" That is more than the twins differ from each other there ({spread:.1g})." if noisy else ""
            return self._failed(self.first, more)
        if self._loss.basis == "learned" or self._rounded is not False:
            return None
        found = next(iter(_from_all(self._ours, self._twins, self._limits)), None)
        if found is None:
            return None
        far = max(self._distances(self._twins[:1]).values())
        return inconclusive(
            f"{in_words(found, 'in the twin')} It began as rounding does (after a restart, three or more ranks sum "
            f"in another order) and has grown to {far:.2g}: training in low precision, or for many "
            "steps, may do that. parameter_digest checks what was restored; set a tolerance to decide.",
            **measured_of(found),
        )

    def _distances(self, twins: Sequence[Steps]) -> dict[int, float]:
        """The differences of the losses from the nearest twin, in steps that the run and the twins made on the same
        ranks."""
        alike = Both.of(self._ours, self._twins[0]).ours
        return distances(alike, twins, LOSS, self._loss.typical)

    @property
    def first_in_words(self) -> str:
        """The first difference, in words."""
        scaled = self.first is not None and is_scaled(self._ours, self._twins[0], self.first)
        return "loss times its scale" if scaled else self.first.what if self.first else ""

    def _failed(self, first: Difference, more: str = "") -> Finding:
        words = f"{in_words(first, 'in the twin', self.first_in_words)}{more}{self._means_before(first.step)}"
        if odd := uneven(self._twins[0]):
            told = f"{words} But {odd}: it is not known whether the difference is a defect."
            return inconclusive(told, First(What.LOSS, first.step))
        cause = likeliest_cause(self._run, self._history, self._ours, self._twins[0], first, self._twin, self._twins)
        finding = failed(f"{words} {cause.words}", first_of(first, cause), **measured_of(first))
        return replace(finding, cause=cause.short)

    def _means_before(self, step: int) -> str:
        """A sentence about earlier steps, made by other ranks than in the twin, whose means differ by less than is
        allowed. Empty if there are none."""
        earlier = differences(until(self._ours, step - 1), self._twins[0], self._limits, other_world=ROUNDING)
        found = [other for other in earlier if other.rank is None]
        if not found:
            return ""
        far = max(other.relative for other in found)
        return (
            f" In {_steps(sorted({other.step for other in found}))} before, made by other ranks than in the twin, the "
            f"mean loss is up to {far:.2g} off, which is allowed there."
        )

    def _too_noisy(self) -> Finding | None:
        """The inconclusive finding if the twins can't decide: they are too noisy in too many steps, or the run differs
        by an amount that may be chance."""
        if self._loss.basis != "learned":
            return None
        dark = [step for step in self._ours if not self._loss.judges(step)]
        if len(dark) > self._spared:
            spread = max((self._loss.spreads.get(step, math.inf) for step in dark), default=math.inf)
            size = f"by up to {spread:.2g} of the value" if math.isfinite(spread) else "and are not finite in one"
            return inconclusive(
                f"too noisy to judge: in {_steps(dark)} the twins differ from each other {size}, and a tolerance of "
                f"more than {CAP:g} would excuse real defects. Give the job a fixed seed (weights, data order, "
                "dropout), or a tolerance.",
                noise=spread,
            )
        far = self._distances(self._twins)
        odd = next((step for step in far if self._loss.judges(step) and far[step] > self._loss.allowed(step)), None)
        if odd is None:
            return None
        return inconclusive(
            f"in step {odd} the loss is {far[odd]:.2g} from the nearest twin's, and {len(self._twins)} twins differ by "
            f"{self._loss.spreads[odd]:.2g} there: a defect, or chance. More twins or a tolerance would decide.",
            step=odd, relative_difference=far[odd],
        )  # fmt: skip

    @property
    def _spared(self) -> int:
        """The number of steps that may be too noisy to be judged. State that is lost in a restart shows in many steps,
        so it is found in spite of this."""
        return len(self._ours) // 10

    def _gaps(self) -> Finding | None:
        missing = sorted(self._twins[0].keys() - self._done.keys())
        extra = sorted(self._done.keys() - self._twins[0].keys())
        last, why = max(self._done, default=0), self.why_other_end() if missing or extra else ""
        why = f". {why}" if why else ""
        if missing:
            return failed(
                f"{_steps(missing)} of the twin's never took place: the final history ends with step {last}{why}",
                First(What.LAST if missing[0] > last else What.ABSENT, missing[0]),
                missing=len(missing),
            )
        if extra:
            return failed(
                f"{_steps(extra)} took place, and the twin ended with step {max(self._twins[0])}{why}",
                First(What.LAST, extra[0]),
                extra=len(extra),
            )
        return None

    def why_other_end(self) -> str:
        """A sentence on why the job ended in another step than its twin, although their losses agree. Empty if they
        don't, or if chance may decide; if the job had not resumed, or did not end well; or if a fault hit it later."""
        resumed = self._history.segments[1:][-1:]
        if not resumed or not resumed[0].base or own_exit_code(self._run) != 0:
            return ""
        hit = any(landing.at_s >= resumed[0].started_s for landing in landings(self._run))
        if hit or self._loss.basis == "learned" or self._invalid or self.first or self._rounded is False:
            return ""
        both = Both.of(self._ours, self._twins[0]).ours
        if not both.executions.loss_seen.all():
            return ""
        exact = next(differences(self._ours, self._twins[0], 0.0), None) is None
        agree = said("losses agree" if exact else "losses near")
        return said("agree until", agree=agree, steps=counted(len(both), "step"), why=said("decides end"))

    def _unseen(self) -> Finding | None:
        if self._unreported:
            return inconclusive(f"not all ranks reported step {min(self._unreported)}, in the run or in the twin")
        silent, apart = self._silent, self._silent_apart
        for step in self._in_part():
            by_rank, twins = self._ours[step], self._twins[0][step]
            if by_rank.keys() != twins.keys():
                blind = [
                    rank
                    for steps, without in zip((by_rank, twins), apart, strict=True)
                    for rank, done in steps.items()
                    if not (done.loss_seen or rank in without)
                ]
            else:  # a step without a backward has no loss, in neither run
                both = [(rank, ours, twins[rank]) for rank, ours in by_rank.items()]
                both = [(rank, ours, theirs) for rank, ours, theirs in both if ours.losses or theirs.losses]
                seen = [rank for rank, ours, theirs in both if ours.loss_seen and theirs.loss_seen]
                blind = [rank for rank, _ours, _theirs in both if rank not in seen and rank not in silent]
            if blind:
                return inconclusive(
                    f"the loss of step {step} on rank {blind[0]} was not seen, in the run or in the twin, although "
                    "others were: the backward hook did not fire in it, or its value was never copied"
                )
        return None

    def _in_part(self) -> list[int]:
        """The steps in which the loss of a rank that has losses was perhaps not seen."""
        both, silent = Both.of(self._ours, self._twins[0]), list(self._silent)
        mine, twins = both.ours.executions, both.theirs.executions
        some = (lengths(mine.column("losses")) > 0) | (lengths(twins.column("losses")) > 0)
        blind = some & ~(mine.loss_seen & twins.loss_seen) & ~np.isin(mine.rank, silent)
        return sorted({*both.ours.numbers[both.ours.any(blind)].tolist(), *both.apart.tolist()})

    @cached_property
    def _silent(self) -> set[int]:
        """The ranks without a loss in those steps that both runs made on the same ranks."""
        both = Both.of(self._ours, self._twins[0])
        return without_losses(both.ours, both.theirs)

    @cached_property
    def _silent_apart(self) -> tuple[set[int], set[int]]:
        """The ranks that have no loss in the other steps, in the run and in the twin."""
        apart = Both.of(self._ours, self._twins[0]).apart.tolist()
        return without_losses(self._ours.at(apart)), without_losses(self._twins[0].at(apart))

    def _well(self) -> Finding:
        silent = self._silent
        ranks = len(self._ours.executions.ranks - without_losses(self._ours))
        where = "1 rank" if ranks == 1 else f"{ranks} ranks"
        worst = max(self._distances(self._twins[:1]).values(), default=0.0)
        allowed = self._loss.largest
        how = f"within {allowed:.3g} of the twin's" if allowed else "bitwise equal to the twin's"
        if self._loss.basis == "learned":
            how = f"as near to the twins' as the twins' are to each other (at most {allowed:.2g})"
        elif not allowed and worst and rounded_from(self._history) is not None:
            how = f"the twin's, {but_for_rounding(worst, self._history)}"
        dark = [step for step in self._ours if not self._loss.judges(step)]
        spared = f", except {_steps(dark)}, where the twins differ too much to decide" if dark else ""
        lines = ", as far as the job's log shows" if self._history.source == "log" else ""
        changed = len(Both.of(self._ours, self._twins[0]).apart)
        least = "" if self._loss.basis == "given" else f", and are within {max(OTHER_WORLD, allowed):.3g} of the twin's"
        means = (
            f"; in steps with another number of ranks, the means over the ranks were compared{least}" if changed else ""
        )
        if self._moved:
            means += f"; in {_steps(self._moved)} the ranks had each other's samples, and were compared by samples"
        if self._divided:
            means += f"; in {_steps(self._divided)} the same samples had another number of backwards, and the sums of "
            means += "their losses were compared"
        if silent:
            none = "none in the other steps" if changed else "none, in the run or in the twin"
            means += f"; rank {_list(silent)} has {none}, and was left out"
        return passed(
            f"the losses of all {len(self._ours)} steps on {where} are {how}{spared}{lines}{means}",
            steps=len(self._ours), ranks=ranks, largest_difference=worst, twins=len(self._twins),
        )  # fmt: skip


def in_words(first: Difference, other: str, what: str = "") -> str:
    """A sentence about the first difference. `other`: the source of the other value, such as "in the twin"; `what`:
    what differs, if it is not what the difference says."""
    where = "on average over the ranks" if first.rank is None else f"on rank {first.rank}"
    by = f" (relative difference {first.relative:.2g})" if math.isfinite(first.relative) else ""
    what = what or first.what
    of = f" of {first.backward}" if first.backward and what == "loss" else ""
    return (
        f"the {what}{of} differs first in step {first.step} {where}: {first.ours:.9g} instead of "
        f"{first.theirs:.9g} {other}{by}."
    )


def _steps_of(twins: Sequence[Record]) -> list[StepTable]:
    return [until(twin.history.by_step(), final_step(twin)) for twin in twins]


def _from_all(
    ours: Steps, twins: Sequence[Steps], limits: Tolerances, factor: float = LEARNED_FACTOR
) -> list[Difference]:
    """The differences that a run has from every twin, in order of steps, with the values of the first twin."""
    by_twin = [
        {
            (difference.step, difference.rank, difference.what): difference
            for difference in differences(ours, twin, limits, factor=factor)
        }
        for twin in twins
    ]
    common = set(by_twin[0]).intersection(*by_twin[1:])
    return [difference for where, difference in by_twin[0].items() if where in common]


def _of_a_rank(difference: Difference) -> bool:
    """Whether the difference is in the loss of a single rank. Noise and rounding can only make such differences."""
    return difference.what == "loss" and difference.rank is not None


def _list(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def first_of(first: Difference, cause: Cause) -> First:
    """The loss, as what went wrong first: a loss that came before the samples that differ does not follow from them."""
    return First(What.LOSSES if cause.before_samples else What(first.what), first.step)


def measured_of(first: Difference) -> dict[str, object]:
    return {"step": first.step, "rank": first.rank, "relative_difference": first.relative}


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]})"
