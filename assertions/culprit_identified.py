"""Were the right ranks blamed for a hang, all of them and no others?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import Blame


@dataclass(frozen=True)
class CulpritIdentified(Assertion):
    """Compares the blamed ranks with the ranks that the faults hit, over all faults of the run. `precision`: the share
    (0 to 1) of blamed ranks that must be right. `recall`: the share of hit ranks that must be blamed. `report`: judges
    another tool instead of torchaos's own diagnosis. It is the path of a JSON file with `culprits`, a list of ranks;
    the file must exist when the run ends. `{run}` stands for the job's folder."""

    name = "culprit_identified"
    harm = Harm.REACTION
    needs = frozenset({Need.HANGS})

    precision: float = 1.0
    recall: float = 1.0
    report: str | None = None

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        bound = {name: value for name, value in vars(self).items() if value is not None}
        return replace(Blame(**vars(self)).finding(run), bound=bound)
