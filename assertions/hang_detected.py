"""Did anybody notice that the job hung, who, and how fast?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchaos.plugin import Assertion, Finding, Harm, Need, Record, Seconds
from torchaos.plugin.analysis import HangReaction, Regex


@dataclass(frozen=True)
class HangDetected(Assertion):
    """A stall was noticed in time. `by`: who must notice it: the job's own time-outs (docs/known-failures.md),
    torchaos's observers (by declaring a hang), or either. `pattern`: a regular expression for the log line by which the
    job reports the stall, if the line is not a known one. `within`: seconds from the fault until it is noticed.
    `suspected_within`: seconds from the fault until the observers' first suspicion. If the recovery from the fault
    hangs, that hang counts, from its own beginning."""

    name = "hang_detected"
    harm = Harm.REACTION
    needs = frozenset({Need.HANGS})

    by: Literal["anyone", "job", "observers"] = "anyone"
    within: Seconds | None = None
    suspected_within: Seconds | None = None
    pattern: Regex | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        bound = {name: value for name, value in vars(self).items() if value is not None}
        return replace(HangReaction(**vars(self)).finding(run), bound=bound)
