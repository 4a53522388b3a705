"""The control pages of a fault and the orders that point to them: what the ranks are told, and where they answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torchaos.harness.agent.page import ControlPage
from torchaos.harness.agent.plan import Moment, Order
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.registry import phase_of

LEASE_S = 3600.0  # a fault in a rank ends after this long even when nobody is left to take it back


@dataclass(frozen=True)
class Slots:
    """One page per rank that fires (each target of a fault in the rank) or is held (the pacer of an outside one)."""

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
        """A fault in the rank that is triggered from outside fires at the next phase that its rank enters (at the next
        one of its own kind, where it has one)."""
        fault = self.fault
        when = fault.trigger if isinstance(fault.trigger, Moment) else Moment(0, None, phase_of(fault.inject))
        lease_s = LEASE_S if fault.duration_s is None else fault.duration_s
        for rank, path in self.paths.items():
            if fault.where == "rank":
                moment = replace(when, pacer=rank)
                yield Order(fault.id, moment, str(path), fault.source, fault.injector, fault.params, lease_s)
            else:
                yield Order(fault.id, when, str(path))
