"""One number is wrong.

- numeric.activation: in a layer's output, once, in one forward pass
- numeric.gradient: before the reduction, and so in all ranks
- numeric.reduced_gradient: after the reduction, and so in one rank
- numeric.parameter, numeric.moment: in a rank's memory, from the next step on"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torchaos.injectors.numeric import Change, Corruption, corrupt, gradients
from torchaos.plugin import RankSite


@dataclass(frozen=True)
class _OneNumber(Corruption):
    change: Change = "flip"
    bit: int | None = None
    place: float | None = None


@dataclass(frozen=True)
class Activation(_OneNumber):
    """Changes the output of the `nth` module that is called after the moment of the trigger. In compiled code no
    modules are called."""

    nth: int = 4

    name = "numeric.activation"
    phase = "forward"

    def apply(self, site: RankSite) -> None:
        modules: Any = import_module("torch.nn.modules.module")
        calls = 0

        def hook(module: Any, inputs: Any, output: Any) -> None:
            nonlocal calls
            if not getattr(output, "is_floating_point", bool)() or not output.ndim:
                return
            calls += 1
            if calls == self.nth:
                handle.remove()
                corrupt(site, "activation", [output], self)

        handle = modules.register_module_forward_hook(hook)


@dataclass(frozen=True)
class Gradient(_OneNumber):
    """Changes one number that the rank puts into the first reduction of gradients after the moment of the trigger. All
    replicas are then equal and wrong, so a comparison between them shows nothing."""

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
class ReducedGradient(_OneNumber):
    """Changes one number of the gradient that the optimizer is about to use: after the reduction, the clipping and any
    check of the job. Only this rank's parameters become wrong."""

    name = "numeric.reduced_gradient"
    phase = "optimizer"

    def apply(self, site: RankSite) -> None:
        corrupt(site, "reduced gradient", [one.grad for one in site.parameters if one.grad is not None], self)


@dataclass(frozen=True)
class Parameter(_OneNumber):
    """Changes one number of a parameter on one rank, between two steps. From then on the replicas differ."""

    name = "numeric.parameter"

    def apply(self, site: RankSite) -> None:
        corrupt(site, "parameter", site.parameters, self)


@dataclass(frozen=True)
class Moment(_OneNumber):
    """Changes one number of the optimizer's state on one rank. A digest of the parameters shows it only after the next
    step."""

    name = "numeric.moment"

    def apply(self, site: RankSite) -> None:
        states = [
            state for optimizer in site.optimizers for state in optimizer.state.values() if isinstance(state, dict)
        ]
        moments = [one for state in states for one in state.values() if getattr(one, "ndim", 0)]
        corrupt(site, "moment", moments, self)
