"""Makes the control pages of a fault, and the orders that tell ranks which page to use. A control page is a
memory-mapped file through which the harness and a rank exchange numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torchaos.harness.agent.page import ControlPage
from torchaos.harness.agent.plan import Moment, Order
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.registry import phase_of

LEASE_S = 3600.0  # seconds after which a fault in a rank ends even if no process is left to undo it


@dataclass(frozen=True)
class Slots:
    """The control pages of one fault, by rank. A fault in the rank has a page for each target; a fault from outside has
    a page for its pacer, the rank that is held."""

    fault: PlannedFault
    pages: dict[int, ControlPage]
    paths: dict[int, Path]

    @classmethod
    def make(cls, fault: PlannedFault, folder: RunDir) -> Slots:
        if fault.where == "rank":
            ranks: tuple[int, ...] = fault.target.ranks
        else:
            ranks = (fault.trigger.pacer,) if isinstance(fault.trigger, Moment) else ()
        paths = {rank: folder.pages / f"{fault.id}-rank{rank}.page" for rank in ranks}
        return cls(fault, {rank: ControlPage(path, create=True) for rank, path in paths.items()}, paths)

    def orders(self) -> Iterator[Order]:
        """The orders for the ranks. If a fault in the rank is triggered from outside, it fires when its rank next
        enters the injector's usual phase, or any phase if the injector has none."""
        fault = self.fault
        when = fault.trigger if isinstance(fault.trigger, Moment) else Moment(0, None, phase_of(fault.inject))
        lease_s = LEASE_S if fault.duration_s is None else fault.duration_s
        for rank, path in self.paths.items():
            if fault.where == "rank":
                moment = replace(when, pacer=rank)
                yield Order(fault.id, moment, str(path), fault.source, fault.injector, fault.params, lease_s)
            else:
                yield Order(fault.id, when, str(path))
