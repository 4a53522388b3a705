"""Whether a job saves after so many steps, or after so much time: then no two runs save at the same steps. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from itertools import pairwise

from torchaos.harness.judging.contents import is_below, root_of
from torchaos.harness.judging.landings import landings
from torchaos.harness.judging.pairing import family
from torchaos.harness.record import Record

_ENOUGH, _REGULAR = 3, 1.5  # gaps between saves; the longest over the shortest, in seconds


def saves_vary(run: Record, twins: Sequence[Record]) -> bool:
    """Whether it was seen that checkpoints are of other steps in each run: twins differ, the run differed before its
    first fault already, or the time between saves is the same while the steps between them are not."""
    last = min((twin.history.last_step or 0 for twin in twins), default=0)
    if any(_saved(twin, last - 1) != _saved(twins[0], last - 1) for twin in twins[1:]):
        return True
    landed = landings(run)
    reached = run.history.highest_step(before_s=landed[0].at_s) if landed else run.history.last_step
    if twins and reached and _saved(run, reached - 1, first=True) != _saved(twins[0], reached - 1):
        return True
    gaps = [gap for record in (run, *twins) for gap in _gaps(record)]
    if len(gaps) < _ENOUGH or len({steps for steps, _seconds in gaps}) == 1:
        return False
    seconds = [seconds for _steps, seconds in gaps]
    return max(seconds) <= _REGULAR * min(seconds)


def _saved(record: Record, until: int, first: bool = False) -> set[tuple[str, int]]:
    """What was saved up to that step; `first`: by the first attempt."""
    root = root_of(record)
    return {
        (family(posixpath.relpath(save.path, root) if root else save.path), save.global_step)
        for save in record.history.saves
        if save.global_step is not None and save.global_step <= until and is_below(save.path, root)
        if not (first and save.attempt)
    }


def _gaps(record: Record) -> list[tuple[int, float]]:
    """Steps and seconds between one save and the next of an attempt, but for the save after the last step of all."""
    begun: dict[tuple[int, int], float] = {}
    for save in sorted(record.history.saves, key=lambda one: one.begun_s):
        if save.global_step is not None and save.global_step != record.history.last_step:
            begun.setdefault((save.attempt, save.global_step), save.begun_s)
    return [(b[1] - a[1], begun[b] - begun[a]) for a, b in pairwise(begun) if a[0] == b[0]]
