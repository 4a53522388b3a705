"""A fault: its target, how it is applied and undone, and what proves that it was felt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Mapping, Protocol, Sequence, runtime_checkable

from torchaos.harness.agent.wire import Event

if TYPE_CHECKING:
    from torchaos.harness.contracts.sites import NodeSite
    from torchaos.harness.contracts.watching import Probe
    from torchaos.harness.record.record import Record
    from torchaos.harness.undo.touches import Touches

Where = Literal["rank", "node"]
# as_targeted: agents when the target names nodes, else ranks; the others: no process that can be named beforehand
Hits = Literal["ranks", "agents", "as_targeted", "nodes", "files", "endpoints"]


@dataclass(frozen=True)
class Target:
    """The resolved target of a fault: ranks (global), or whole nodes by index. Faults of files and endpoints have
    neither."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Irreversible:
    """Why a fault can't be undone; its `rollback` then means that the job's supervisor takes over."""

    why: str


@dataclass(frozen=True)
class Evidence:
    """Proof that a fault took effect: a sentence, and the (source, seq) of the events on which it is based."""

    what: str
    events: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, what: str, *events: Event) -> Evidence:
        return cls(what, tuple((event.source, event.seq) for event in events))


@runtime_checkable
class Handle(Protocol):
    """How to undo one change, as data: a frozen dataclass whose fields are JSON. A small closed set, in
    undo/handles."""

    kind: ClassVar[str]

    def touches(self) -> Touches:
        """The things that it may touch; checked before a fault lands, and before changes from a log are undone."""

    def restore(self) -> None:
        """Sets the known-good state. May be called again; checks identity first, and leaves everything else alone."""

    def restored(self) -> bool:
        """Whether the known-good state is there. The identity of the thing is checked, because its absence alone proves
        nothing."""


@runtime_checkable
class Injector(Protocol):
    """One kind of fault. A frozen dataclass: its fields are the parameters under `with` in a scenario. `Fault` in
    agent/fault.py has the defaults, and explains each attribute. The agent loads the module of a fault in the rank by
    its path, so that module imports only the standard library and `torchaos.plugin` at its top."""

    name: ClassVar[str]
    where: ClassVar[tuple[Where, ...]]  # where it can be applied, best first
    needs: ClassVar[frozenset[str]]  # capabilities of the machine and of the launch, see running/capabilities.py
    lethal: ClassVar[bool]
    hits: ClassVar[Hits]
    # What a class does not declare from here on, it gets from `Fault` when the registry loads it.
    lasting: ClassVar[bool]
    phase: ClassVar[str | None]
    late: ClassVar[bool]
    family: ClassVar[str]
    consent: ClassVar[str]
    hooks: ClassVar[tuple[str, ...]]
    on_collectives: ClassVar[bool]
    own_disk: ClassVar[bool]

    def plan(self, target: Target, draw: random.Random) -> Injector:
        """The injector with every random choice made. Pure; no other method makes random choices."""

    def changes(self, site: NodeSite) -> Sequence[Handle] | Irreversible:
        """Everything that `apply` may change, read before `apply` runs. Changes nothing."""

    def apply(self, site: Any) -> None:
        """Causes the fault. `site` is a RankSite in the rank, and a NodeSite outside."""

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        """Further probes that run while the fault is on."""

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Proof from the journal that the fault took effect, or None. Pure. The agent's word alone is no proof."""

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None: ...

    def asked(self) -> Mapping[str, float]: ...

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]] | None: ...
