"""Loss and learning rate by step, for the run and its twin, and the first step at which they differ. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchaos.harness.agent.wire import Kind
from torchaos.harness.judging.landing.landings import landings
from torchaos.harness.judging.noise.quantities import relative
from torchaos.harness.judging.twins.agreement import differences, history_of
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import StepTable
from torchaos.harness.record.steps.columns import is_absent, is_none, lengths
from torchaos.harness.telling.html.thinning import telling

MOST_POINTS = 2_000  # about so many points of a curve are drawn
_MOST_FAULTS = 12  # the most marks of a curve
_ROUND = 9  # significant digits


def curves_of(run: Record, twins: Sequence[Record]) -> dict[str, Any]:
    """The data of the curves: `steps`, and by name a list with a value or None for each step. `loss` and `lr`: of the
    run (the final history, means over the ranks). `first_loss`: the first loss of steps that were done again.
    `twin_loss` and `twin_lr`: of the twin. `apart`: the relative difference of the two losses."""
    history = history_of(run, twins)
    ours, theirs = history.by_step(), twins[0].history.by_step() if twins else StepTable.of({})
    again = StepTable(history.repeated()[0].last_of("global_step", "rank"))
    steps = sorted(ours.keys() | theirs.keys() | again.keys())
    of_steps = {
        "loss": _losses(ours), "twin_loss": _losses(theirs), "first_loss": _losses(again), "lr": _rates(ours),
        "twin_lr": _rates(theirs),
    }  # fmt: skip
    columns = {name: [values.get(step) for step in steps] for name, values in of_steps.items()}
    columns["apart"] = [_apart(a, b) for a, b in zip(columns["loss"], columns["twin_loss"], strict=True)]
    first = next(differences(ours, theirs, 0.0, 0.0), None)
    resumes = [attempt.base for attempt in history.attempts if attempt.number and attempt.base is not None]
    hit = _hit(run)
    shown = _shown(steps, columns, [*resumes, *(step for step, _ in hit), *([first.step] if first else [])])
    return {
        "steps": [steps[place] for place in shown],
        **{name: [_short(values[place]) for place in shown] for name, values in columns.items()},
        "resumes": resumes, "faults": hit,
        "first_difference": None if first is None else {
            "step": first.step, "rank": first.rank, "what": first.what, "run": _in_words(first.ours),
            "twin": _in_words(first.theirs), "relative": _short(first.relative),
        },
        "twin": bool(theirs), "compared": _compared(columns),
        "left_out": f"{len(shown)} of {len(steps)} steps are drawn: in each group of steps, the lowest and "
        "the highest loss"
        if len(shown) < len(steps) else "",
    }  # fmt: skip


def _compared(columns: Mapping[str, Sequence[float | None]]) -> int:
    """The number of steps for which both sides have the loss or the learning rate."""
    pairs = (("loss", "twin_loss"), ("lr", "twin_lr"))
    both = (zip(columns[ours], columns[theirs], strict=True) for ours, theirs in pairs)
    return sum(any(None not in pair for pair in step) for step in zip(*both, strict=True))


def _hit(run: Record) -> list[tuple[int, str]]:
    """The step in which each fault landed, or else the last step before the fault, with the fault's name."""
    found: dict[tuple[int, str], None] = {}
    for landing in landings(run):
        hits = (event for event in run.of_fault(landing.fault, Kind.APPLYING) if event.mono_s >= landing.at_s)
        step = next((event.data["global_step"] for event in hits), None)
        step = run.history.highest_step(before_s=landing.at_s) if step is None else step
        if step is not None:
            found[step, landing.fault] = None
    return list(found)[:_MOST_FAULTS]


def _shown(steps: Sequence[int], columns: Mapping[str, Sequence[float | None]], moments: Sequence[int]) -> list[int]:
    """The indices of the steps to draw: enough to show the shape of a curve, and all steps around a moment."""
    if len(steps) <= MOST_POINTS:
        return list(range(len(steps)))
    near = {place for place, step in enumerate(steps) if any(abs(step - moment) <= 25 for moment in moments)}
    curves = [values for values in columns.values() if any(value is not None for value in values)]
    found = {place for values in curves for place in telling(values, MOST_POINTS // max(1, len(curves)), near)}
    return sorted(found)


def _losses(steps: StepTable) -> dict[int, float]:
    """The mean of all losses of a step."""
    losses = steps.executions.column("losses")
    seen = ~is_none(losses) & ~is_absent(losses)
    sums, counts = steps.sums(np.where(seen, losses, 0.0).sum(1)), steps.sums(seen.sum(1))
    some = counts > 0
    return dict(zip(steps.numbers[some].tolist(), (sums[some] / counts[some]).tolist(), strict=True))


def _rates(steps: StepTable) -> dict[int, float]:
    """The first rate of the first rank that has a rate in a step."""
    rates = steps.executions.column("lr")
    has = np.flatnonzero(lengths(rates) > 0)
    numbers, first = np.unique(steps.executions.global_step[has], return_index=True)
    return dict(zip(numbers.tolist(), rates[has[first], 0].tolist() if len(has) else [], strict=True))


def _apart(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else relative(ours, theirs)


def _in_words(value: float | None) -> str:
    return "not seen" if value is None else f"{value:.{_ROUND}g}"


def _short(value: float | None) -> float | None:
    """The value with nine digits, or None if a chart can't show it."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_ROUND}g}")
