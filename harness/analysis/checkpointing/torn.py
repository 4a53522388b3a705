"""Finds a resume whose state is of two steps: the job went on from the step that the loaded file claims, with that
step's data or counters, but its weights are those after another step. A thread that writes the live tensors while the
training goes on leaves such a file, and so does a copy that is made too late."""

from __future__ import annotations

import posixpath
import re

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

_NUMBER = re.compile(r"\d+")
_FILE, _GOES_ON = (CONTENTS, NAME, RECORD), (SAMPLES, LOG, OPTIMIZER, SCHEDULER, RATES)


def torn(history: History, part: Segment) -> str:
    """A clause about the state with which a segment began, if it is of two steps. Empty if it is not, or if that was
    not seen: the state itself must show the one step, and what the job did next the other. So must the file, or else
    both the optimizer's counter and the samples."""
    base, said_by = part.base, part.witnesses
    loaded = [posixpath.basename(load.path) for load in history.loads if load.attempt == part.number and load.ok]
    if base is None or not loaded or not any(one.name == STATE and base in one.fits for one in said_by):
        return ""
    # A thread may write late: then the record of a save fits many steps, and claims none.
    of_file = [set(one.fits) for one in said_by if one.name in _FILE and (one.name != RECORD or len(one.fits) == 1)]
    claims = [fits for fits in of_file if fits] or [set(map(int, _NUMBER.findall(loaded[-1])))]
    goes_on = {one.name: set(one.fits) for one in said_by if one.name in _GOES_ON and one.fits and base not in one.fits}
    both = set.intersection(*claims) & set().union(*goes_on.values()) - {0}
    if len(both) == 1 and not any(base in fits for fits in claims):
        step = both.pop()
        late = ": they were written, or copied, while the training went on" if base > step else ""
        return said("torn", name=loaded[-1], step=step, weights=base, late=late)
    counted = goes_on.get(OPTIMIZER, set()) & goes_on.get(SAMPLES, set()) - {0}
    names = " and then ".join(dict.fromkeys(loaded))
    return said("mixed", weights=base, step=counted.pop(), names=names) if len(counted) == 1 else ""
