"""numeric.activation: one number of a layer's output is wrong, once, in one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torchaos.injectors.numeric import Change, Corruption, corrupt
from torchaos.plugin import RankSite


@dataclass(frozen=True)
class Activation(Corruption):
    """Changes the output of the `nth` module that is called after the moment of the trigger. In compiled code no
    modules are called."""

    change: Change = "flip"
    bit: int | None = None
    place: float | None = None
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
