"""numeric.parameter and numeric.moment: one bit in a rank's memory is wrong, from the next step on."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.injectors.numeric import Change, Corruption, corrupt
from torchaos.plugin import RankSite


@dataclass(frozen=True)
class Parameter(Corruption):
    """Changes one number of a parameter on one rank, between two steps. From then on the replicas differ."""

    change: Change = "flip"
    bit: int | None = None
    place: float | None = None

    name = "numeric.parameter"

    def apply(self, site: RankSite) -> None:
        corrupt(site, "parameter", site.parameters, self)


@dataclass(frozen=True)
class Moment(Corruption):
    """Changes one number of the optimizer's state on one rank. A digest of the parameters shows it only after the next
    step."""

    change: Change = "flip"
    bit: int | None = None
    place: float | None = None

    name = "numeric.moment"

    def apply(self, site: RankSite) -> None:
        states = [
            state for optimizer in site.optimizers for state in optimizer.state.values() if isinstance(state, dict)
        ]
        moments = [one for state in states for one in state.values() if getattr(one, "ndim", 0)]
        corrupt(site, "moment", moments, self)
