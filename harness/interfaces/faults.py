"""A fault: its target, how it is applied and undone, and what proves that it was felt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Mapping, Protocol, Sequence, runtime_checkable

from torchaos.harness.agent.wire import Event

if TYPE_CHECKING:
    from torchaos.harness.interfaces.jobs import NodeSite
    from torchaos.harness.interfaces.observers import Probe
    from torchaos.harness.record.record import Record
    from torchaos.harness.rollback.file_handles import Touches

Where = Literal["rank", "node"]
# as_targeted: torchruns if the target names nodes, else ranks. nodes, files, endpoints: no process is the target.
Hits = Literal["ranks", "agents", "as_targeted", "nodes", "files", "endpoints"]


@dataclass(frozen=True)
class Target:
    """The resolved target of a fault: global ranks, or whole nodes by index. Both are empty for a fault of files or
    endpoints."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Irreversible:
    """A change that can't be undone, and the reason. The job itself must recover from it."""

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
    """The undo of one change, as data: a frozen dataclass whose fields are JSON. The closed set of handles is in
    undo/handles."""

    kind: ClassVar[str]

    def touches(self) -> Touches:
        """The processes, files and other things that undoing may change. They are checked before the fault is applied,
        and before changes are undone."""

    def restore(self) -> None:
        """Puts back the state that was there before the change. It may be called again. It checks the identity of each
        thing first, and changes nothing else."""

    def restored(self) -> bool:
        """Whether the state is as it was before the change. The identity of the thing is checked too, because a missing
        thing proves nothing."""


@runtime_checkable
class Injector(Protocol):
    """One kind of fault. A frozen dataclass: its fields are the parameters under `with` in a scenario. Inherit from
    `Fault` (agent/rank_faults.py), which has the defaults and explains each attribute. The agent loads the module in
    the rank by its path, so the module imports only the standard library and `torchaos.plugin` at its top."""

    name: ClassVar[str]
    where: ClassVar[tuple[Where, ...]]  # the kinds of sites where it can be applied, best first
    needs: ClassVar[frozenset[str]]  # capabilities of the machine and of the launch, see running/capabilities.py
    lethal: ClassVar[bool]
    hits: ClassVar[Hits]
    # The registry adds the attributes below, with the values of `Fault`, to a class that does not declare them.
    lasting: ClassVar[bool]
    phase: ClassVar[str | None]
    late: ClassVar[bool]
    family: ClassVar[str]
    imitates: ClassVar[str]
    replays: ClassVar[str]
    consent: ClassVar[str]
    hooks: ClassVar[tuple[str, ...]]
    on_collectives: ClassVar[bool]
    own_disk: ClassVar[bool]

    def plan(self, target: Target, draw: random.Random) -> Injector:
        """This injector after every random choice. Pure; no other method makes random choices."""

    def changes(self, site: NodeSite) -> Sequence[Handle] | Irreversible:
        """Everything that `apply` may change. It is called before `apply`, and changes nothing itself."""

    def apply(self, site: Any) -> None:
        """Causes the fault. `site` is a RankSite in the rank, and a NodeSite outside."""

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        """The additional probes that run while the fault is on."""

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Proof from the journal that the fault took effect, or None. Pure. An event of the target's own agent is no
        proof by itself."""

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None: ...

    def asked(self) -> Mapping[str, float]: ...

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]] | None: ...
