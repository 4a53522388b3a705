"""The tools of an injector in a rank: the site at which it is applied (`RankSite`), and the lease of a lasting fault
(`Lease`). Also how the agent loads an injector (`load`). Standard library only.

To undo a lasting fault, the harness, the reaper or `torchaos recover` writes to the fault's control page. If none of
these is alive, the fault ends with its lease."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from ...protocol import wire
from ...protocol.control_pages import ControlPage, wait_until

if TYPE_CHECKING:
    from ...protocol.nccl_connections import NetOrder
    from ..agent import Agent
    from ..collectives.collective_calls import Call


class Lease:
    """How long one firing of a fault lasts: from the making of this object until the fault is undone or `lease_s`
    seconds have passed."""

    def __init__(self, page: ControlPage, path: str, lease_s: float) -> None:
        self._page, self.control, self.number = page, path, page.read(ControlPage.FIRED)
        self._end = time.monotonic() + lease_s

    @property
    def on(self) -> bool:
        return time.monotonic() < self._end and self._page.read(ControlPage.GO) < self.number

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def sleep(self, seconds: float | None = None) -> None:
        """Sleeps at most `seconds` (None: until the lease ends), or until the fault is undone."""
        end = self._end if seconds is None else min(self._end, time.monotonic() + seconds)
        wait_until(lambda: not self.on, end)


class On(Protocol):
    @property
    def on(self) -> bool: ...


class Once:
    """A condition that stays true until its owner sets `on` to False."""

    on = True


class LastingFaults:
    """The functions that lasting faults run at each collective and after each step. `on_batch`: the functions to call
    once with the next batch."""

    def __init__(self) -> None:
        self.on_batch: list[Callable[[Any], None]] = []
        self.on_calls: list[tuple[On, Callable[[Call], None]]] = []
        self.on_steps: list[tuple[On, Callable[[], None]]] = []

    def enter(self, call: Call) -> None:
        self.on_calls = [entry for entry in self.on_calls if entry[0].on]
        for _lease, then in self.on_calls:
            then(call)

    def receive(self, batch: Any) -> None:
        due, self.on_batch = self.on_batch, []
        for then in due:
            then(batch)

    def step_over(self) -> None:
        self.on_steps = [entry for entry in self.on_steps if entry[0].on]
        for _lease, then in self.on_steps:
            then()


class RankSite:
    """The place in a rank at which a fault is applied, if the rank is its own target; see `interfaces.Site`. `lease`:
    how long a lasting fault is on. `call`: the collective that is about to start, in the phase `collective`."""

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

    @property
    def parameters(self) -> list[Any]:
        """The parameters that these optimizers train, each once, in order."""
        from ..state.tensor_names import parameters

        return parameters(self.optimizers)

    def at_collectives(self, then: Callable[[Call], None]) -> None:
        """Calls `then` before each collective while the fault lasts, also before the collective at which the fault
        fired. Raises ValueError if the injector does not declare that it needs to see collectives."""
        if "collectives" not in self._agent.live:
            raise ValueError(f"{self.fault} looks at collectives: its injector must declare hooks = ('collectives',)")
        self._agent.lasting.on_calls.append((self.lease, then))

    def at_next_batch(self, then: Callable[[Any], None]) -> None:
        """Calls `then` with the next batch that the loop gets from its loader. `then` may change the batch in place."""
        self._agent.lasting.on_batch.append(then)

    def stall_nccl(self, name: str, nth: int, min_bytes: int | None, max_bytes: int | None) -> None:
        """Stalls the nth call, from now on, of the NCCL function `name` with `min_bytes` to `max_bytes` bytes. An event
        later reports how long the call was held."""
        from ...protocol.control_pages import NcclCall, NvtxPage

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
        from ...protocol.nccl_connections import HITS, LAST_BYTES, NetKind, NetPage

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


def load(source: str, injector: str, params: Mapping[str, Any]) -> Any:
    """Makes an instance of the class `injector` of the file `source`. Raises the errors of the import and of the
    constructor."""
    name = f"_torchaos_injector_{abs(hash(source)):x}"
    with _our_names(os.path.dirname(source)):
        module = sys.modules.get(name)
        if module is None:
            spec = importlib.util.spec_from_file_location(name, source)
            if spec is None or spec.loader is None:
                raise ImportError(f"{source} is no Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # dataclasses look their module up there
            spec.loader.exec_module(module)
        return getattr(module, injector)(**params)


# Rooms that an injector may use in a rank, because they need the standard library only.
_ROOMS = ("interfaces", "base_classes")


@contextmanager
def _our_names(folder: str) -> Iterator[None]:
    """Changes imports while an injector is imported: `torchaos.harness.agent` and `torchaos.harness.protocol` are the
    modules of this agent; `torchaos.plugin` and the rooms in _ROOMS are found beside it, other rooms not;
    `torchaos.injectors` finds its modules in `folder`. Afterwards, restores sys.modules."""

    def ours() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchaos"}

    before, agent = ours(), __package__.rpartition(".")[0]
    own, harness = agent.rpartition(".")[0], os.path.dirname(sys.modules[agent].__path__[0])
    try:
        for name in before:
            del sys.modules[name]
        for name, path in (("", os.path.dirname(harness)), (".harness", harness), (".injectors", folder)):
            sys.modules[f"torchaos{name}"] = ModuleType(f"torchaos{name}")
            sys.modules[f"torchaos{name}"].__path__ = [path]
        for name, module in list(sys.modules.items()):
            if name.startswith((agent, f"{own}.protocol")):
                sys.modules[f"torchaos.harness{name[len(own) :]}"] = module
        for room in _ROOMS:
            importlib.import_module(f"torchaos.harness.{room}")
        sys.modules["torchaos.harness"].__path__ = []
        yield
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
