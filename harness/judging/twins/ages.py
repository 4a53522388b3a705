"""Decides whether twins that were made earlier still belong to the job that was run. Changed input files are found
before a run (running/twins/inputs.py). Any other change shows only in the records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchaos.harness.judging.ending.teardown import final_step
from torchaos.harness.judging.landing.landings import landings
from torchaos.harness.judging.noise.tolerance import Tolerances
from torchaos.harness.judging.twins import agreement
from torchaos.harness.record.record import Record


def are_of_another_job(run: Record, old: Sequence[Record]) -> bool:
    """Whether the run differs from each of these twins before its first fault, by more than the twins differ from each
    other. `old`: twins that were made at the same time."""
    history = agreement.history_of(run, old)
    landed = landings(run)
    early = agreement.before(history, landed[0].at_s if landed else math.inf)
    theirs = [agreement.until(twin.history.by_step(), final_step(twin)) for twin in old]
    known = [{step: ranks for step, ranks in steps.items() if step in early} for steps in theirs]
    limits = Tolerances.learned(known)
    return all(any(agreement.differences(early, steps, limits)) for steps in known)


def differ_by_age(old: Sequence[Record], new: Sequence[Record]) -> bool:
    """Whether a new twin differs from an earlier twin. Then the two together can't show the noise of the job."""
    return any(not agreement.agree(recent, [earlier]) for recent in new for earlier in old)
