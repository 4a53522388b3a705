"""numeric.gradient and numeric.reduced_gradient: a wrong number before the reduction reaches all ranks alike, after it
one rank alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchaos.injectors.numeric import Change, Corruption, corrupt, gradients, trained
from torchaos.plugin import RankSite


@dataclass(frozen=True)
class Gradient(Corruption):
    """One number of what the rank gives into the first reduction of gradients from the Moment on. All replicas then are
    equal and wrong, so that comparing them shows nothing."""

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
    """One number of the gradient that the optimizer is about to use, after reduction, clipping and any guard: only this
    rank's parameters go wrong."""

    change: Change = "flip"
    bit: int | None = None
    place: float | None = None

    name = "numeric.reduced_gradient"
    phase = "optimizer"

    def apply(self, site: RankSite) -> None:
        corrupt(site, "reduced gradient", [one.grad for one in trained(site) if one.grad is not None], self)
