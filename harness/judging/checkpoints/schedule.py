"""Whether a job saves after so many steps, or after so much time: then no two runs save at the same steps. Pure."""

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

_ENOUGH, _REGULAR = 3, 1.5  # gaps between saves; the longest over the shortest, in seconds


def saves_vary(run: Record, twins: Sequence[Record]) -> bool:
    """Whether it was seen that checkpoints are of other steps in each run: twins differ, the run differed before its
    first fault already, no count of steps explains the first save after a resume, or the time between saves is the
    same while the steps between them are not."""
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
    """What was saved up to that step; `first`: by the first attempt."""
    return {
        (_kin(save, record), save.global_step)
        for save in record.history.saves
        if save.global_step is not None and save.global_step <= until and is_below(save.path, root_of(record))
        if not (first and save.attempt)
    }


def _kin(save: Save, record: Record) -> str:
    """The family of its path, which a run and its twin have in common."""
    root = root_of(record)
    return family(posixpath.relpath(save.path, root) if root else save.path)


def _leaves_the_grid(run: Record, twin: Record) -> bool:
    """Whether the twin saved every so many steps, and the run, after a resume, first at a step that is on that grid
    neither from the start of the job nor from where it resumed. A name that speaks of another step than in the twin
    shows a wrong count, and no timer."""
    last = max(record.history.last_step or 0 for record in (run, twin))
    for base, save in _first_after_resumes(run):
        theirs = [one for one in twin.history.saves if _kin(one, twin) == _kin(save, run)]
        steps = sorted({one.global_step or 0 for one in theirs} - {last})
        every, at = {b - a for a, b in pairwise(steps)}, save.global_step
        if at in (None, last) or len(steps) < _ENOUGH or len(every) > 1:
            continue
        offsets = {(at - start) % max(every) for start in (0, steps[0], base, base + steps[0])}
        if 0 not in offsets and _ahead(save) in {_ahead(one) for one in theirs}:
            return True
    return False


def _first_after_resumes(run: Record) -> Iterator[tuple[int, Save]]:
    """The first save of each family in each later attempt, with the step from which that resumed. Only of what the job
    resumes from: when the best checkpoint is written, a metric decides. Not after a landing in that attempt, which may
    make a job save at once."""
    points, landed, root = points_of(run), landings(run), root_of(run)
    bases = {one.number: one.base for one in run.history.attempts[1:]}
    seen: set[tuple[int, str]] = set()
    for save in sorted(run.history.saves, key=lambda one: one.begun_s):
        base, key = bases.get(save.attempt), (save.attempt, _kin(save, run))
        if base is None or key in seen or not is_below(save.path, root) or not points.has(save.path):
            continue
        seen.add(key)
        if not any(one.attempt == save.attempt and one.at_s <= save.begun_s for one in landed):
            yield base, save


def _ahead(save: Save) -> int | None:
    """By how many steps its name is ahead of the step at which it was saved; None: its name tells of no step."""
    named = number_in_name(save.path)
    return None if named is None else named - (save.global_step or 0)


def _gaps(record: Record) -> list[tuple[int, float]]:
    """Steps and seconds between one save and the next of an attempt, but for the save after the last step of all."""
    begun: dict[tuple[int, int], float] = {}
    for save in sorted(record.history.saves, key=lambda one: one.begun_s):
        if save.global_step is not None and save.global_step != record.history.last_step:
            begun.setdefault((save.attempt, save.global_step), save.begun_s)
    return [(b[1] - a[1], begun[b] - begun[a]) for a, b in pairwise(begun) if a[0] == b[0]]
