"""What an injector in a rank works with: the types of its parameters, its base class, the place at which it is applied,
and the lease of a fault that lasts. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

from . import wire
from .control_pages import ControlPage, wait_until

if TYPE_CHECKING:
    from torchaos.harness.interfaces import Evidence, Hits, NodeSite, Probe, Target, Where
    from torchaos.harness.record.record import Record

    from .agent import Agent
    from .collective_calls import Call
    from .nccl_connections import NetOrder


# Types for quantities in injectors and scenarios. Standard library only.

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(value: object) -> float:
    """Seconds from a text such as `90s`, `1m30s` or `250ms`. Raises ValueError, also if the unit is missing."""
    text = str(value).strip()
    if text == "0" and not isinstance(value, bool):
        return 0.0
    if not isinstance(value, str) or not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        raise ValueError(f"{value!r} is not a duration; write a number with a unit, such as 250ms, 30s, 5m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))


class _DurationSchema:
    """Lets pydantic read fields of type `Seconds`, without an import of pydantic here."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(parse_duration, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {"type": "string", "pattern": f"^(0|({_DURATION.pattern})+)$", "examples": ["30s", "5m"]}


Seconds = Annotated[float, _DurationSchema()]


class _Limits:
    """The bounds of a number, with pydantic's names for them."""

    def __init__(self, **limits: float) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), **self._limits}


Count = Annotated[int, _Limits(ge=1)]
Size = Annotated[int, _Limits(ge=0)]
Share = Annotated[float, _Limits(ge=0.0, lt=1.0)]
Positive = Annotated[float, _Limits(gt=0.0)]


# The defaults that most faults share. An injector may inherit from `Fault`, or implement `contracts.Injector` without
# it.
#
# Standard library only: the agent loads injectors, and with them this file, in the Python of the job.

Self = TypeVar("Self")
DRAWN = "drawn"


def drawn() -> Any:
    """A field that `plan` fills and that a scenario must not give, such as the ranks of the target."""
    return field(default=(), metadata={DRAWN: True})


class Fault:
    """Defaults for a fault that hits rank processes and makes no random choice. Each injector defines `changes`,
    `apply` and `felt` itself. There is no default for how a fault is undone."""

    name: ClassVar[str]
    where: ClassVar[tuple[Where, ...]]  # where it can be applied, the best place first
    needs: ClassVar[frozenset[str]] = frozenset()  # capabilities of the machine and of the launch
    hits: ClassVar[Hits] = "ranks"
    lethal: ClassVar[bool] = False  # the target process does not survive it
    lasting: ClassVar[bool] = False  # applied in a rank, it stays on until it is undone
    phase: ClassVar[str | None] = None  # the phase in which it lands if the trigger names a step only
    late: ClassVar[bool] = False  # its changes are known at the Moment only, such as which checkpoint is newest
    on_collectives: ClassVar[bool] = False  # it hits only the TCP traffic between ranks
    hooks: ClassVar[tuple[str, ...]] = ()  # the agent's hooks that its proof needs
    own_disk: ClassVar[bool] = False  # it hits the file system that job.checkpoints.size makes
    family: ClassVar[str] = ""  # its subject, such as gpu or numeric; empty: the first part of its name
    imitates: ClassVar[str] = (
        ""  # whose report it imitates; empty: the hardware, the kernel or a library really does it
    )
    replays: ClassVar[str] = ""  # what really said what it says again: a machine of a record in injectors/shown.yaml
    consent: ClassVar[str] = ""  # it can harm more of the host than the job: kmsg, cgroup, clock, host-network

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        return self

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return ()

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
        """Proof from a comparison with runs without faults, for a fault that no event of the run itself can prove."""
        return None

    def asked(self) -> Mapping[str, float]:
        """The requested values of a network fault, to be shown beside the measured values: `delay_ms`, `loss_percent`,
        ..."""
        return {}

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]] | None:
        """The signals that have the same effect, as (seconds after the fault, signal number), for `torchaos repro`.
        None if no signals have the same effect."""
        return None


# Faults in a rank that last until they are undone, or until their lease is over. To undo a fault, the harness, the
# reaper or `torchaos recover` writes to its control page. The lease ends the fault if none of these is alive.


class Lease:
    """The time during which one firing of a fault is on: from its creation until the fault is undone or `lease_s`
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


class Lasting:
    """The functions that lasting faults run at each collective and after each step."""

    def __init__(self) -> None:
        self.on_calls: list[tuple[On, Callable[[Call], None]]] = []
        self.on_steps: list[tuple[On, Callable[[], None]]] = []

    def enter(self, call: Call) -> None:
        self.on_calls = [entry for entry in self.on_calls if entry[0].on]
        for _lease, then in self.on_calls:
            then(call)

    def step_over(self) -> None:
        self.on_steps = [entry for entry in self.on_steps if entry[0].on]
        for _lease, then in self.on_steps:
            then()


# The place at which a fault is applied in a rank that is its own target. Fits `contracts.Site`.


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
        from .control_pages import NcclCall, NvtxPage

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
        from .nccl_connections import HITS, LAST_BYTES, NetKind, NetPage

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


# Loads an injector from its file, in a Python that may not have torchaos installed.


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


@contextmanager
def _our_names(folder: str) -> Iterator[None]:
    """Adapts imports while an injector is imported: `torchaos.harness.agent` is this package, `torchaos.plugin` is
    found beside the harness, and `torchaos.injectors` finds its modules in `folder`. Afterwards, restores
    sys.modules."""

    def ours() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchaos"}

    before, own = ours(), __name__.rpartition(".")[0]
    agent = {name: module for name, module in sys.modules.items() if name == own or name.startswith(f"{own}.")}
    root = os.path.dirname(os.path.dirname(agent[own].__path__[0]))
    try:
        for name in before:
            del sys.modules[name]
        for name, path in (("torchaos", [root]), ("torchaos.harness", []), ("torchaos.injectors", [folder])):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = path
        for name, module in agent.items():
            sys.modules[f"torchaos.harness.agent{name[len(own) :]}"] = module
        yield
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
