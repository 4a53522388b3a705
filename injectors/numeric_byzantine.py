"""numeric.scaled_gradient and numeric.stale_gradient: a rank takes part but gives wrong gradients. `for` is the
duration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from torchaos.injectors.numeric import Corruption, gathered, gradients
from torchaos.plugin import Handle, Kind, NodeSite, RankSite


class _WrongGradients(Corruption):
    """Lasts until its control page is cleared, whose undo is on disk for every fault."""

    hooks = ("collectives", "state")
    phase = "collective"
    lasting = True

    def plan(self, target: Any, draw: Any) -> Any:
        return self

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        return ()


@dataclass(frozen=True)
class ScaledGradient(_WrongGradients):
    """Multiplies all gradients that the rank gives to the others by `factor`. `operation`: how it gives them. A job
    that takes their median gathers them. FSDP gathers parameters, which would be hit instead."""

    factor: float = 10.0
    operation: Literal["reductions", "all_gather"] = "reductions"

    name = "numeric.scaled_gradient"

    def apply(self, site: RankSite) -> None:
        tell = _once(site, f"gradients are {self.factor} times what they should be")
        given = gathered if self.operation == "all_gather" else gradients

        def scale(call: Any) -> None:
            for tensor in given(call):
                tensor.data.mul_(self.factor)
                tell()

        site.at_collectives(scale)


@dataclass(frozen=True)
class StaleGradient(_WrongGradients):
    """In each step, the rank gives the gradients of its first step under the fault again."""

    name = "numeric.stale_gradient"

    def apply(self, site: RankSite) -> None:
        torch: Any = import_module("torch")
        tell = _once(site, "gradients are those of an earlier step")
        kept: list[Any] = []  # of the first step
        now: list[int] = [0, 0]  # the step, and the number of the reduction in it

        def repeat(call: Any) -> None:
            for tensor in gradients(call):
                if now[0] == 0:
                    kept.append(tensor.detach().clone())
                elif now[1] < len(kept) and kept[now[1]].shape == tensor.shape:
                    with torch.no_grad():
                        tensor.data.copy_(kept[now[1]])
                    tell()
                now[1] += 1

        def step_over() -> None:
            now[:] = [now[0] + 1, 0]

        site.at_collectives(repeat)
        site.after_steps(step_over)


def _once(site: RankSite, effect: str) -> Callable[[], None]:
    """A function that reports `effect` when it is called for the first time. Call it only after a number was
    changed."""
    due = [effect]

    def tell() -> None:
        while due:
            site.emit(Kind.EFFECT, {"fault": site.fault, "effect": due.pop()})

    return tell
