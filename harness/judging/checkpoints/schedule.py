"""Decides whether a job saves at fixed steps or at fixed times. At fixed times, each run saves at other steps."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torchaos.harness.judging.checkpoints.contents import is_below, root_of
from torchaos.harness.judging.checkpoints.pairing import family
from torchaos.harness.judging.checkpoints.points import points_of
from torchaos.harness.judging.landing.landings import landings
from torchaos.harness.record.history import Save
from torchaos.harness.record.history.checkpoints import number_in_name
from torchaos.harness.record.record import Record

_ENOUGH = 3  # gaps between saves that are needed to judge
_REGULAR = 1.5  # the longest gap divided by the shortest


def saves_vary(run: Record, twins: Sequence[Record]) -> bool:
    """Whether the record shows that each run saves at other steps. That is so in four cases: the twins differ; the run
    differed before its first fault; no fixed number of steps explains the first save after a resume; or the seconds
    between saves are regular and the steps between them are not."""
    last = min((twin.history.last_step or 0 for twin in twins), default=0)
    if any(_saved(twin, last - 1) != _saved(twins[0], last - 1) for twin in twins[1:]):
        return True
    landed = landings(run)
    reached = run.history.highest_step(before_s=landed[0].at_s) if landed else run.history.last_step
    if twins and reached and _saved(run, reached - 1, first=True) != _saved(twins[0], reached - 1):
        return True
    if twins and _leaves_the_grid(run, twins[0]):
        return True
    gaps = [gap for record in (run, *twins) for gap in _gaps(record)]
    if len(gaps) < _ENOUGH or len({steps for steps, _seconds in gaps}) == 1:
        return False
    seconds = [seconds for _steps, seconds in gaps]
    return max(seconds) <= _REGULAR * min(seconds)


def _saved(record: Record, until: int, first: bool = False) -> set[tuple[str, int]]:
    """Family and global step of each save up to step `until`. `first`: only those of the first attempt."""
    return {
        (_kin(save, record), save.global_step)
        for save in record.history.saves
        if save.global_step is not None and save.global_step <= until and is_below(save.path, root_of(record))
        if not (first and save.attempt)
    }


def _kin(save: Save, record: Record) -> str:
    """The family of the path below the checkpoint folder. A run and its twin have the same families."""
    root = root_of(record)
    return family(posixpath.relpath(save.path, root) if root else save.path)


def _leaves_the_grid(run: Record, twin: Record) -> bool:
    """Whether the twin saved at a fixed interval of steps, and the first save of the run after a resume does not fit
    that interval, counted from the start of the job or from the resume.

    If the name of the save has another step than the twin's names, that shows a wrong step count, not a timer."""
    last = max(record.history.last_step or 0 for record in (run, twin))
    for base, save in _first_after_resumes(run):
        theirs = [other for other in twin.history.saves if _kin(other, twin) == _kin(save, run)]
        steps = sorted({other.global_step or 0 for other in theirs} - {last})
        every, at = {b - a for a, b in pairwise(steps)}, save.global_step
        if at in (None, last) or len(steps) < _ENOUGH or len(every) > 1:
            continue
        offsets = {(at - start) % max(every) for start in (0, steps[0], base, base + steps[0])}
        if 0 not in offsets and _ahead(save) in {_ahead(other) for other in theirs}:
            return True
    return False


def _first_after_resumes(run: Record) -> Iterator[tuple[int, Save]]:
    """Yields the first save of each family in each attempt but the first, with the step from which the attempt resumed.

    Only checkpoints that the job resumes from are included, because a metric decides when the best checkpoint is
    written. Saves after a fault in that attempt are left out, because a fault may make a job save at once."""
    points, landed, root = points_of(run), landings(run), root_of(run)
    bases = {attempt.number: attempt.base for attempt in run.history.attempts[1:]}
    seen: set[tuple[int, str]] = set()
    for save in sorted(run.history.saves, key=lambda save: save.begun_s):
        base, key = bases.get(save.attempt), (save.attempt, _kin(save, run))
        if base is None or key in seen or not is_below(save.path, root) or not points.has(save.path):
            continue
        seen.add(key)
        if not any(landing.attempt == save.attempt and landing.at_s <= save.begun_s for landing in landed):
            yield base, save


def _ahead(save: Save) -> int | None:
    """How far the number in the checkpoint's name is ahead of the step of the save. None if the name contains no
    number."""
    number = number_in_name(save.path)
    return None if number is None else number - (save.global_step or 0)


def _gaps(record: Record) -> list[tuple[int, float]]:
    """(steps, seconds) between successive saves of an attempt, without the save after the last step of the run."""
    begun: dict[tuple[int, int], float] = {}
    for save in sorted(record.history.saves, key=lambda save: save.begun_s):
        if save.global_step is not None and save.global_step != record.history.last_step:
            begun.setdefault((save.attempt, save.global_step), save.begun_s)
    return [(b[1] - a[1], begun[b] - begun[a]) for a, b in pairwise(begun) if a[0] == b[0]]
