"""The defaults that most faults share. An injector may inherit from `Fault`, or implement `contracts.Injector` without
it.

Standard library only: the agent loads injectors, and with them this file, in the Python of the job."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Hits, NodeSite, Probe, Target, Where
    from torchaos.harness.record.record import Record

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
