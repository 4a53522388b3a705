"""Recognizes the values in a checkpoint that are no part of the training state: the time of the save, and the number of
restarts. A restart changes such values in a healthy job; in a twin they never change. A value that the job lost can
differ by as little, for example a counter of bad evaluations that starts again at 0. Only the name and the content
distinguish such a value from bookkeeping, so both must match."""

from __future__ import annotations

import re

from torchaos.harness.judging.checkpoints.contents import Checkpoint, Clash

_CLOCK = re.compile(r"time|date|clock|elapsed|duration|second|uuid|host", re.I)
_RESTART = r"(?:restart|resum|incarnation|relaunch|respawn|lineage)[a-z]*"
_COUNT = re.compile(
    rf"(?:^|[._:])(?:n_?|num_?|is_?|was_?)?(?:{_RESTART}|attempts?|launch(?:es)?)(?:_?(?:count|from|path|step))?$", re.I
)
_SOURCE = re.compile(r"(?:^|[._:])_?name_or_path$")  # where a library of Hugging Face loaded a model from
_LIST = re.compile(rf"(?:^|[._:]){_RESTART}\.\d+(?:\.|$)", re.I)


def may_be_a_clock(clash: Clash) -> bool:
    """Whether the differing value may be a time. Then its name is that of a time, or both values are seconds,
    milliseconds or nanoseconds since 1970 for a date from 2001 to 2096."""
    return clash.kind == "value" and bool(_CLOCK.search(clash.name) or all(map(_is_date, (clash.ours, clash.theirs))))


def _is_date(text: str | None) -> bool:
    try:
        number = float(text or "")
    except ValueError:
        return False
    return any(1e9 < number / unit < 4e9 for unit in (1.0, 1e3, 1e9))


def counts_restarts(clash: Clash, checkpoint: Checkpoint) -> bool:
    """Whether the differing value only shows that the job was restarted. Either it is the place that a model was loaded
    from, and this is a checkpoint of the run; or its name is about restarts, and restarts explain the change from the
    twin's value: a number that is larger by at most the number of restarts, True instead of False, a checkpoint path
    instead of no path, or one more element of a list."""
    if clash.kind != "value" or not checkpoint.attempt or clash.ours is None:
        return False
    is_own = any(folder in clash.ours for folder in (checkpoint.root, checkpoint.named) if folder)
    if _SOURCE.search(clash.name):
        return is_own
    if clash.theirs is None:
        return _LIST.search(clash.name) is not None
    if not _COUNT.search(clash.name):
        return False
    if clash.theirs in ("0", "1"):  # some jobs count their first start
        return clash.ours.isdecimal() and 0 < int(clash.ours) - int(clash.theirs) <= checkpoint.attempt
    if clash.theirs == "False":
        return clash.ours == "True"
    return clash.theirs in ("None", "''") and is_own
