"""numeric.gradient: a number is wrong before the reduction, and so in all ranks. numeric.reduced_gradient: a number is
wrong after the reduction, and so in one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchaos.injectors.numeric import Change, Corruption, corrupt, gradients
from torchaos.plugin import RankSite


@dataclass(frozen=True)
class Gradient(Corruption):
    """Changes one number that the rank puts into the first reduction of gradients after the moment of the trigger. All
    replicas are then equal and wrong, so a comparison between them shows nothing."""

    change: Change = "flip"
    bit: int | None = None
    place: float | None = None

    name = "numeric.gradient"
    phase = "collective"
    hooks = ("collectives", "state")

    def apply(self, site: RankSite) -> None:
        done: list[bool] = []

        def once(call: Any) -> None:
            found = [] if done else gradients(call)
            if found:
                done.append(True)
                corrupt(site, "gradient before the reduction", found, self)

        site.at_collectives(once)


@dataclass(frozen=True)
class ReducedGradient(Corruption):
    """Changes one number of the gradient that the optimizer is about to use: after the reduction, the clipping and any
    check of the job. Only this rank's parameters become wrong."""

    change: Change = "flip"
    bit: int | None = None
    place: float | None = None

    name = "numeric.reduced_gradient"
    phase = "optimizer"

    def apply(self, site: RankSite) -> None:
        corrupt(site, "reduced gradient", [one.grad for one in site.parameters if one.grad is not None], self)
