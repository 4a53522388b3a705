"""The place at which a fault is applied in a rank that is its own target. Fits `contracts.Site`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Mapping

from . import wire
from .lasting import Lease, Once

if TYPE_CHECKING:
    from .agent import Agent
    from .calls import Call
    from .nccl_net import NetOrder


class RankSite:
    """The place in a rank at which a fault is applied. `lease`: how long a lasting fault is on. `call`: the collective
    that is about to start, in the phase `collective`."""

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
        """The living optimizers of the training loop, in the order in which they were made."""
        return self._agent.optimizers

    def at_collectives(self, then: Callable[[Call], None]) -> None:
        """Calls `then` before each collective while the fault lasts, including the current collective. Raises
        ValueError if the injector does not declare that it needs to see collectives."""
        if "collectives" not in self._agent.live:
            raise ValueError(f"{self.fault} looks at collectives: its injector must declare hooks = ('collectives',)")
        self._agent.lasting.on_calls.append((self.lease, then))

    def stall_nccl(self, name: str, nth: int, min_bytes: int | None, max_bytes: int | None) -> None:
        """Stalls the nth call, from now on, of the NCCL function `name` with `min_bytes` to `max_bytes` bytes. An event
        later reports how long the call was held."""
        from .nvtx import NcclCall, NvtxPage

        page, waiting = NvtxPage.of_this_process(), Once()
        page.order(NcclCall(name, nth, min_bytes, max_bytes), self.lease.control, self.lease.number, self.lease.left_s)

        def report() -> None:
            if (held_s := page.held_s) is not None:
                waiting.on = False
                text = f"{name} was held for {held_s:.2f} s"
                self.emit(wire.Kind.NOTE, {"text": text, "fault": self.fault, "held_s": held_s})

        self._agent.lasting.on_steps.append((waiting, report))

    def nccl_net(self, order: NetOrder) -> None:
        """Tells the network plug-in of NCCL to disturb this rank's connections, as long as the fault lasts. One event
        reports the first transfer that was hit. Another event reports at the end how many were hit."""
        from .nccl_net import HITS, LAST_BYTES, NetKind, NetPage

        page, waiting, reported = NetPage.of_this_process(), Once(), False
        slot = page.order(order, self.lease.control, self.lease.number, self.lease.left_s)

        def report() -> None:
            nonlocal reported
            hits, size, is_over = page.read(HITS, slot), page.read(LAST_BYTES, slot), not self.lease.on
            text = f"{order.kind.name.lower()} hit {hits} {order.kind.hit_unit}, the last of {size} bytes"
            if is_over or (hits and not reported):
                self.emit(wire.Kind.NOTE, {"text": text, "fault": self.fault, "hits": hits})
            if hits and not reported and order.kind == NetKind.CORRUPT:
                effect = f"a byte of a transfer of {size} bytes came out wrong"
                self.emit(wire.Kind.EFFECT, {"fault": self.fault, "effect": effect})
            reported, waiting.on = reported or hits > 0, not is_over

        self._agent.lasting.on_steps.append((waiting, report))

    def after_steps(self, then: Callable[[], None]) -> None:
        """Calls `then` after each step while the fault lasts."""
        self._agent.lasting.on_steps.append((self.lease, then))
