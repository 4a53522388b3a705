"""The base classes of faults, assertions and conditions, with the defaults of everything optional. Standard library
only, because injectors are loaded in ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torchaos.harness.interfaces import (
    Evidence,
    Finding,
    Handle,
    Harm,
    Hits,
    Irreversible,
    Need,
    NodeSite,
    Probe,
    Target,
    Watched,
    Where,
    inconclusive,
)
from torchaos.harness.protocol.wire import Event

if TYPE_CHECKING:
    from torchaos.harness.record.plan import PlannedFault
    from torchaos.harness.record.record import Record

API = 1  # the number of the names in torchaos.plugin; it grows when a name or its meaning changes
Self = TypeVar("Self")


class Fault:
    """One kind of fault. A frozen dataclass: its fields are the parameters under `with` in a scenario. The defaults are
    those of a fault that hits rank processes and makes no random choice. Each injector defines `changes`, `apply` and
    `felt` itself: there is no default for how a fault is undone. The agent loads the module in the rank by its path, so
    the module imports only the standard library and `torchaos.plugin` at its top."""

    name: ClassVar[str]
    where: ClassVar[tuple[Where, ...]]  # where it can be applied, the best place first
    needs: ClassVar[frozenset[str]] = frozenset()  # capabilities, see running/capabilities.py
    hits: ClassVar[Hits] = "ranks"
    lethal: ClassVar[bool] = False  # the target process does not survive it
    lasting: ClassVar[bool] = False  # applied in a rank, it stays on until it is undone
    phase: ClassVar[str | None] = None  # the phase in which it lands if the trigger names a step only
    late: ClassVar[bool] = False  # its changes are known at the Moment only, such as which checkpoint is newest
    on_collectives: ClassVar[bool] = False  # it hits only the TCP traffic between ranks
    hooks: ClassVar[tuple[str, ...]] = ()  # the agent's hooks that its proof needs
    own_disk: ClassVar[bool] = False  # it hits the file system that job.checkpoints.size makes
    family: ClassVar[str] = ""  # its subject, such as gpu or numeric; empty: the first part of its name
    imitates: ClassVar[str] = ""  # whose report it imitates; empty: the hardware, the kernel or a library does it
    replays: ClassVar[str] = ""  # what really said what it says again: a machine of a record in injectors/shown.yaml
    consent: ClassVar[str] = ""  # it can harm more of the host than the job: kmsg, cgroup, clock, host-network

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        """This injector after every random choice. Pure; no other method makes random choices."""
        return self

    def changes(self, site: NodeSite) -> Sequence[Handle] | Irreversible:
        """Everything that `apply` may change. It is called before `apply`, and changes nothing itself."""
        raise NotImplementedError

    def apply(self, site: Any) -> None:
        """Causes the fault. `site` is a RankSite in the rank, and a NodeSite outside."""
        raise NotImplementedError

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        """The additional probes that run while the fault is on."""
        return ()

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Proof from the journal that the fault took effect, or None. Pure. An event of the target's own agent is no
        proof by itself."""
        raise NotImplementedError

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


class Assertion:
    """One question about a run. A frozen dataclass: its fields are the bounds that the scenario gives."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]]
    harm: ClassVar[Harm] = Harm.OTHER  # what a failure means for the job
    # It is inconclusive, and not asked, if a run has none of these: STEPS, LOSS, SAMPLES or STATE.
    requires: ClassVar[tuple[Need, ...]] = ()

    @property
    def expects_recovery(self) -> bool:
        """Whether the job is expected to recover from its faults, and not to give up."""
        return True

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        """The answer, from the records alone. Pure. `twins`: the records of the twins, if there are any."""
        raise NotImplementedError

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """The answer for a job of several replicas. The method may be one of the functions of
        analysis/replica_verdict.py."""
        return inconclusive(
            f"{self.name} judges the ranks of one torchrun only, not a job of {run.plan.job.replicas} replicas"
        )


class Condition:
    """A statement about the run that is true or false, judged from the events so far. A frozen dataclass: its fields
    come from the scenario."""

    about_job: ClassVar[bool] = True  # it is about the job; False: about the machine. Read for stop conditions

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        """Whether the condition is true now; None: not known, or not known yet. Pure. `now_s`: seconds of
        CLOCK_MONOTONIC."""
        raise NotImplementedError

    def probes(self, at: Watched) -> Sequence[Probe]:
        """The probes that must run during the run. Equal probes of several conditions run once."""
        return ()

    @staticmethod
    def of_faults(params: Mapping[str, Any], faults: Sequence[PlannedFault]) -> Mapping[str, Any]:
        """Parameters that are computed from the planned faults. They replace the parameters in the scenario. Raises
        UsageError."""
        return {}
