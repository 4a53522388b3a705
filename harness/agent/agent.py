"""The one object that the hooks of a rank share: where events go, how far the attempt is, what has failed."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Mapping, TypeVar

from . import wire
from .lasting import Lasting
from .orders import Orders
from .phases import Phases
from .plan import AgentPlan
from .tally import Tally

if TYPE_CHECKING:
    from .arming import Identity
    from .calls import Call

Function = TypeVar("Function", bound=Callable[..., Any])

_HOOK_OF_PHASE = {
    wire.Phase.START: "steps",
    wire.Phase.DATA: "samples",
    wire.Phase.FORWARD: "samples",
    wire.Phase.BACKWARD: "steps",
    wire.Phase.COLLECTIVE: "collectives",
    wire.Phase.OPTIMIZER: "steps",
    wire.Phase.CHECKPOINT_WRITE: "checkpoints",
    wire.Phase.CHECKPOINT_WRITTEN: "checkpoints",
    wire.Phase.CHECKPOINT_LOAD: "checkpoints",
}


class Agent:
    """`on` is what every hook asks first; it is False in forked children and once the agent has stepped aside."""

    def __init__(self, plan: AgentPlan, who: Identity, events: wire.EventFile) -> None:
        self.plan, self.who, self.on = plan, who, True
        self._events = events
        self.broken: set[str] = set()  # what has failed
        self.thread = threading.get_ident()  # the one that trains
        self.steps_over = 0  # iterations over in this attempt
        self.loads = 0  # files of checkpoints that were loaded
        self.phases, self.tally = Phases(), Tally()
        self.made: dict[int, weakref.ref[Any]] = {}  # optimizers, by id
        self.lasting = Lasting()
        self.orders = Orders(self)
        self.hooks = self._wanted()
        self.live = set(self.hooks)  # hooks in service
        self.unseen = set(self.hooks)  # hooks that have not fired yet

    @property
    def optimizers(self) -> list[Any]:
        """Those that are alive, in the order in which they were made: the same in all ranks, and in all runs."""
        return [alive for one in list(self.made.values()) if (alive := one()) is not None]

    def _wanted(self) -> tuple[str, ...]:
        """What the plan names, and what this rank's orders can't do without."""
        wanted = {"steps", *self.plan.hooks}
        for order in self.orders.mine:
            if order.when.step is not None:
                wanted.add("checkpoints")  # a load moves the first step
            if order.when.phase is not None:
                wanted.add(_HOOK_OF_PHASE[order.when.phase])
        return tuple(sorted(wanted))

    def emit(self, kind: wire.Kind, data: Mapping[str, Any], step: int | None = None) -> wire.Event:
        """Write one event; without a `step` it carries the number of iterations that are over."""
        return self._events.emit(kind, data, step=self.steps_over if step is None else step)

    def fail(self, hook: str, error: BaseException) -> None:
        """Take one hook out of service and say so, once. The job goes on."""
        if hook in self.broken:
            return
        self.broken.add(hook)
        self.live.discard(hook)
        if hook == "steps":  # everything else hangs on it
            self.on = False
        try:
            self.emit(wire.Kind.AGENT_FAILED, {"hook": hook, "error": f"{type(error).__name__}: {error}"})
        except Exception as second:
            self.on = False
            print(f"torchaos: the agent stepped aside: {error!r}, {second!r}", file=sys.stderr)

    def careful(self, hook: str) -> Callable[[Function], Function]:
        """A decorator for the agent's own work inside a hook: an error in it disables the hook, never the job."""

        def decorate(function: Function) -> Function:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                if hook in self.broken:
                    return None
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    self.fail(hook, error)
                    return None

            return call  # type: ignore[return-value]

        return decorate

    def saw(self, hook: str) -> None:
        self.unseen.discard(hook)

    def enter(self, phase: wire.Phase, call: Call | None = None) -> None:
        """A phase begins on this rank's host. May fire an order, whose exception is the job's to bear."""
        self.phases.enter(phase)
        if self.orders.hot:
            self.orders.enter(phase, call)
        if call is not None and self.lasting.on_calls:
            self.lasting.enter(call)

    def starts(self) -> None:
        """The process has imported torch, and done nothing with it yet. May fire an order, as `enter` does."""
        if self.orders.hot:
            self.orders.enter(wire.Phase.START)

    def started(self, torch_version: str | None) -> None:
        """Say who is there. Without torch this is said when the process ends."""
        import platform

        data = {
            "pid": self.who.pid, "start_ticks": wire.start_ticks(self.who.pid), "local_rank": self.who.local_rank,
            "world_size": self.who.world_size, "python": platform.python_version(), "torch": torch_version,
            "hooks": list(self.hooks), "group": ":".join(os.environ.get(n, "") for n in ("MASTER_ADDR", "MASTER_PORT")),
        }  # fmt: skip
        if os.environ.get(wire.ENV_NODE, "").isdigit():
            data["node"] = int(os.environ[wire.ENV_NODE])
        if os.environ.get(wire.ENV_REPLICA, "").isdigit():
            data["replica"] = int(os.environ[wire.ENV_REPLICA])
        self.emit(wire.Kind.AGENT_STARTED, data)

    def ended(self) -> None:
        if self.on and os.getpid() == self.who.pid:
            self.emit(wire.Kind.AGENT_ENDED, {"unseen": sorted(self.unseen)})
