"""Where a fault is applied when the process is its own target. Fits `contracts.Site`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Mapping

from . import wire
from .lasting import Lease

if TYPE_CHECKING:
    from .agent import Agent
    from .calls import Call


class RankSite:
    """`lease` says how long a fault that lasts is on."""

    def __init__(
        self, agent: Agent, fault: str, step: int | None, phase: wire.Phase | None, call: Call | None, lease: Lease
    ) -> None:
        self.fault, self.step, self.phase, self.lease = fault, step, phase, lease
        self.pids = [os.getpid()]
        self._agent, self._call = agent, call

    @property
    def call(self) -> Call:
        """The collective that the rank is about to start. Raises ValueError if the Moment is not a collective."""
        if self._call is None:
            raise ValueError(f"fault {self.fault} landed in phase {self.phase}, which is no collective")
        return self._call

    def signal(self, number: int) -> None:
        os.kill(self.pids[0], number)

    def emit(self, kind: wire.Kind, data: Mapping[str, Any]) -> wire.Event:
        return self._agent.emit(kind, data)

    @property
    def optimizers(self) -> list[Any]:
        """Those that the training loop has made and that are alive, in the order in which they were made."""
        return self._agent.optimizers

    def at_collectives(self, then: Callable[[Call], None]) -> None:
        """Called before each collective from now on, this one included, for as long as the fault lasts."""
        self._agent.lasting.on_calls.append((self.lease, then))

    def stall_nccl(self, name: str, nth: int, min_bytes: int | None, max_bytes: int | None) -> None:
        """The nth call of that name from now on waits for as long as the fault lasts."""
        from .nvtx import NcclCall, NvtxPage

        call = NcclCall(name, nth, min_bytes, max_bytes)
        NvtxPage.of_this_process().order(call, self.lease.control, self.lease.number, self.lease.left_s)

    def after_steps(self, then: Callable[[], None]) -> None:
        """Called after each step from now on, for as long as the fault lasts."""
        self._agent.lasting.on_steps.append((self.lease, then))
