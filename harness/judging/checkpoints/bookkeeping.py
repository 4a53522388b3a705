"""Values in a checkpoint that say nothing of training: when it was saved, and which restart this was. Pure.

A restart changes them in a healthy job, and never in a twin. Nothing but their names and what is in them tells them
from what was lost: a counter of bad evaluations that starts anew differs by as little. So both must fit.
"""

from __future__ import annotations

import re

from torchaos.harness.judging.checkpoints.contents import Checkpoint, Clash

_CLOCK = re.compile(r"time|date|clock|elapsed|duration|second|uuid|host", re.I)
_RESTART = r"(?:restart|resum|incarnation|relaunch|respawn|lineage)[a-z]*"
_COUNT = re.compile(
    rf"(?:^|[._:])(?:n_?|num_?|is_?|was_?)?(?:{_RESTART}|attempts?|launch(?:es)?)(?:_?(?:count|from|path|step))?$", re.I
)
_LIST = re.compile(rf"(?:^|[._:]){_RESTART}\.\d+(?:\.|$)", re.I)


def may_be_a_clock(clash: Clash) -> bool:
    """By its name, or because both values are seconds (or thousandths or billionths) since 1970, from 2001 to 2096."""
    return clash.kind == "value" and bool(_CLOCK.search(clash.name) or all(map(_is_date, (clash.ours, clash.theirs))))


def _is_date(text: str | None) -> bool:
    try:
        number = float(text or "")
    except ValueError:
        return False
    return any(1e9 < number / unit < 4e9 for unit in (1.0, 1e3, 1e9))


def counts_restarts(clash: Clash, one: Checkpoint) -> bool:
    """Whether a value says no more than that the job was restarted. Its name speaks of that, and it is what restarts
    make of the twin's: a number that is larger by as many as there were, or by fewer, yes instead of no, a path of the
    checkpoints instead of none, or a line more of a list."""
    if clash.kind != "value" or not one.attempt or clash.ours is None:
        return False
    if clash.theirs is None:
        return _LIST.search(clash.name) is not None
    if not _COUNT.search(clash.name):
        return False
    if clash.theirs in ("0", "1"):  # a job may count itself as the first
        return clash.ours.isdecimal() and 0 < int(clash.ours) - int(clash.theirs) <= one.attempt
    if clash.theirs == "False":
        return clash.ours == "True"
    return clash.theirs in ("None", "''") and any(folder in clash.ours for folder in (one.root, one.named) if folder)
