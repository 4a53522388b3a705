"""Whether twins that were made earlier are still those of the job that was run. Pure.

Files that changed are seen before a run (running/twins/inputs.py). What else may have changed shows in the record
alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchaos.harness.judging.ending.teardown import final_step
from torchaos.harness.judging.landing.landings import landings
from torchaos.harness.judging.noise.tolerance import Tolerances
from torchaos.harness.judging.twins import agreement
from torchaos.harness.record.record import Record


def are_of_another_job(run: Record, old: Sequence[Record]) -> bool:
    """Whether the run differs from twins of one age before its first fault, by more than they do among themselves."""
    history = agreement.history_of(run, old)
    landed = landings(run)
    early = agreement.before(history, landed[0].at_s if landed else math.inf)
    theirs = [agreement.until(twin.history.by_step(), final_step(twin)) for twin in old]
    known = [{step: ranks for step, ranks in steps.items() if step in early} for steps in theirs]
    limits = Tolerances.learned(known)
    return all(any(agreement.differences(early, steps, limits)) for steps in known)


def differ_by_age(old: Sequence[Record], new: Sequence[Record]) -> bool:
    """Whether a twin that was made now is not what an earlier one is: no noise can be learned from the two."""
    return any(not agreement.agree(one, [other]) for one in new for other in old)
