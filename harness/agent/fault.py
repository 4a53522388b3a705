"""What most faults share. An injector may build on it or fit `contracts.Injector` in its own way.

Standard library only: the agent loads injectors, and with them this file, inside the job's own Python.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Handle, Hits, Irreversible, Probe, Site, Target, Where
    from torchaos.harness.record import Record

Self = TypeVar("Self")
DRAWN = "drawn"


def drawn() -> Any:
    """A field that `plan` fills, and no scenario: the ranks of the target."""
    return field(default=(), metadata={DRAWN: True})


class Fault:
    """Defaults for a fault that hits rank processes and draws nothing. `name`, `where`, `needs`, `changes`, `apply` and
    `felt` are the injector's own: above all, each says itself how it is taken back."""

    hits: ClassVar[Hits] = "ranks"
    lethal: ClassVar[bool] = False
    lasting: ClassVar[bool] = False  # applied in the rank, it is on until it is taken back
    phase: ClassVar[str | None] = None  # where it lands, when the trigger names a step alone
    late: ClassVar[bool] = (
        False  # `changes` can be told at the Moment only, such as which checkpoint is the newest then
    )
    on_collectives: ClassVar[bool] = False  # it hits what goes between ranks over TCP, and that only
    hooks: ClassVar[tuple[str, ...]] = ()  # of the agent, that its proof needs
    own_disk: ClassVar[bool] = False  # it hits the file system that job.checkpoints.size makes
    family: ClassVar[str] = ""  # what it is about, such as gpu or numeric; empty: the first part of its name
    consent: ClassVar[str] = ""  # such as kmsg, cgroup, clock, host-network: it can hurt the host beyond the job

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        return self

    def probes(self, site: Site) -> Sequence[Probe]:
        return ()


class WaitingFault(Fault):
    """Defaults for a fault in which the rank waits where its `phase` begins, until it is taken back. Nothing but the
    fault's own control page holds it, and that is guarded for every fault."""

    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    lasting: ClassVar[bool] = True

    def changes(self, site: Site) -> Sequence[Handle]:
        return ()

    def apply(self, site: Any) -> None:
        site.lease.sleep()

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return import_module("torchaos.harness.judging.waits").all_waited(record, fault)  # type: ignore[no-any-return]


class OutsideFault(Fault):
    """Defaults for a fault from outside whose work several injectors share: in the module that `mechanics` names, which
    is imported where it is needed, and never in a rank."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset()
    mechanics: ClassVar[str]

    def changes(self, site: Site) -> Sequence[Handle] | Irreversible:
        return import_module(self.mechanics).changes(self, site)  # type: ignore[no-any-return]

    def apply(self, site: Site) -> None:
        import_module(self.mechanics).apply(self, site)

    def probes(self, site: Site) -> Sequence[Probe]:
        return import_module(self.mechanics).probes(self, site)  # type: ignore[no-any-return]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return import_module(self.mechanics).felt(self, record, fault)  # type: ignore[no-any-return]


class CutFault(OutsideFault):
    """Defaults for dropping what goes between nodes; `peers`, `direction`, `ports` and `percent` say what."""

    hits: ClassVar[Hits] = "nodes"
    needs: ClassVar[frozenset[str]] = frozenset({"links", "nft"})
    on_collectives: ClassVar[bool] = True
    mechanics: ClassVar[str] = "torchaos.harness.network.cuts"


class ShapedFault(OutsideFault):
    """Defaults for what is done to all that nodes send; for both directions, name all nodes. A method `shape` says
    what, `counter` which number of the kernel shows it, and `asked` what a probe connection should measure."""

    hits: ClassVar[Hits] = "nodes"
    needs: ClassVar[frozenset[str]] = frozenset({"links", "shaper", "tc", "ss"})
    on_collectives: ClassVar[bool] = True
    mechanics: ClassVar[str] = "torchaos.harness.network.shapes"
    counter: ClassVar[str]
    words: ClassVar[str] = ""

    @property
    def least(self) -> float:
        return 1.0


class NodeDeath(Fault):
    """Defaults for a fault that ends all of the job's processes on nodes."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"pidfd", "proc"})
    lethal: ClassVar[bool] = True
    hits: ClassVar[Hits] = "nodes"
    irreversible: ClassVar[str] = "a dead node can't be brought back; that is the scheduler's affair"

    def changes(self, site: Site) -> Irreversible:
        return import_module("torchaos.harness.contracts").Irreversible(self.irreversible)  # type: ignore[no-any-return]


class ProxyFault(OutsideFault):
    """Defaults for a toxic of Toxiproxy before one of the job's endpoints: `endpoint` and `stream` say where, and
    `attributes` how much, in the units of Toxiproxy (ms, KB/s)."""

    hits: ClassVar[Hits] = "endpoints"
    needs: ClassVar[frozenset[str]] = frozenset({"toxiproxy", "ss"})
    mechanics: ClassVar[str] = "torchaos.harness.proxy.toxics"
    toxic: ClassVar[str] = ""  # its type; empty: the proxy is down
    proofs: ClassVar[tuple[str, ...]] = ("sent_bytes", "got_bytes")  # counts of proxy/traffic.py, any of them

    def attributes(self) -> dict[str, Any]:
        return {}


class CheckpointFault(OutsideFault):
    """Defaults for damage to checkpoints: a field `seed`, None until it is drawn, and a method `edits`."""

    hits: ClassVar[Hits] = "files"
    late: ClassVar[bool] = True  # which checkpoint is the newest shows at the Moment
    mechanics: ClassVar[str] = "torchaos.harness.checkpoints.damage"

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        drawn = draw.getrandbits(32)
        return replace(self, seed=drawn) if vars(self)["seed"] is None else self  # type: ignore[type-var]


class StorageFault(OutsideFault):
    """Defaults for a fault of the file system that the checkpoints lie on: a method `rules` says what goes wrong."""

    late: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"fuse"})
    mechanics: ClassVar[str] = "torchaos.harness.storage.mounted"

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        return replace(self, ranks=target.ranks)  # type: ignore[type-var]
