"""What most faults share. An injector may build on it or fit `contracts.Injector` in its own way.

Standard library only: the agent loads injectors, and with them this file, inside the job's own Python.
"""

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
    """A field that `plan` fills and no scenario may give, such as the ranks of the target."""
    return field(default=(), metadata={DRAWN: True})


class Fault:
    """Defaults for a fault that hits rank processes and makes no random choice. Each injector has its own `changes`,
    `apply` and `felt`; above all, each states itself how it is undone."""

    name: ClassVar[str]
    where: ClassVar[tuple[Where, ...]]  # where it can be applied, the better first
    needs: ClassVar[frozenset[str]] = frozenset()  # capabilities of the machine and of the launch
    hits: ClassVar[Hits] = "ranks"
    lethal: ClassVar[bool] = False  # the target process does not survive it
    lasting: ClassVar[bool] = False  # applied in the rank, it is on until it is taken back
    phase: ClassVar[str | None] = None  # where it lands, when the trigger names a step alone
    late: ClassVar[bool] = False  # what it changes shows at the Moment only, such as which checkpoint is the newest
    on_collectives: ClassVar[bool] = False  # it hits what goes between ranks over TCP, and that only
    hooks: ClassVar[tuple[str, ...]] = ()  # of the agent, that its proof needs
    own_disk: ClassVar[bool] = False  # it hits the file system that job.checkpoints.size makes
    family: ClassVar[str] = ""  # what it is about, such as gpu or numeric; empty: the first part of its name
    consent: ClassVar[str] = ""  # such as kmsg, cgroup, clock, host-network: it can hurt the host beyond the job

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        return self

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return ()

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
        """Proof from a comparison with runs without faults, for a fault that no witness within the run can prove."""
        return None

    def asked(self) -> Mapping[str, float]:
        """The requested values of a network fault, to be shown beside the measured values: `delay_ms`, `loss_percent`,
        ..."""
        return {}

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]] | None:
        """Signals with the same effect, as (seconds after, signal), for `torchaos repro`; None if there are none."""
        return None
