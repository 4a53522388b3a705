"""Finds a resume whose state is of two steps: the job went on from the step that the loaded file claims, with that
step's data or counters, but its weights are those after another step. A thread that writes the live tensors while the
training goes on leaves such a file, and so does a copy that is made too late."""

from __future__ import annotations

import posixpath

from torchaos.harness.analysis.claims import said
from torchaos.harness.record.history import History, Segment
from torchaos.harness.record.history.step_evidence import (
    CONTENTS,
    LOG,
    NAME,
    OPTIMIZER,
    RATES,
    RECORD,
    SAMPLES,
    SCHEDULER,
    STATE,
)

_FILE, _GOES_ON = (CONTENTS, NAME, RECORD), (SAMPLES, LOG, OPTIMIZER, SCHEDULER, RATES)


def torn(history: History, part: Segment) -> str:
    """A clause about the state with which a segment began, if it is of two steps. Empty if it is not, or if that was
    not seen: the state itself must show the one step, and the file and what the job did next the other."""
    base, said_by = part.base, part.witnesses
    if base is None or not any(one.name == STATE and base in one.fits for one in said_by):
        return ""
    claims = [set(one.fits) for one in said_by if one.name in _FILE and one.fits and base not in one.fits]
    goes_on = [set(one.fits) for one in said_by if one.name in _GOES_ON and one.fits and base not in one.fits]
    both = set.intersection(*claims) & set().union(*goes_on) - {0} if claims else set()
    if len(both) != 1 or any(one.name in _FILE and base in one.fits for one in said_by):
        return ""
    loaded = [load.path for load in history.loads if load.attempt == part.number and load.ok]
    if not loaded:
        return ""
    step = both.pop()
    late = ": they were written, or copied, while the training went on" if base > step else ""
    return said("torn", name=posixpath.basename(loaded[-1]), step=step, weights=base, late=late)
