"""The base classes of faults, assertions and conditions, with the defaults of everything optional, and the types of
their parameters. Standard library only, because injectors are loaded in ranks."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

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

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(value: object) -> float:
    """The seconds in a text such as `90s`, `1m30s` or `250ms`. Raises ValueError for any other text, also if the unit
    is missing."""
    text = str(value).strip()
    if text == "0" and not isinstance(value, bool):
        return 0.0
    if not isinstance(value, str) or not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        raise ValueError(f"{value!r} is not a duration; write a number with a unit, such as 250ms, 30s, 5m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))


class _DurationSchema:
    """Lets pydantic read fields of the type `Seconds`. pydantic itself is not imported here."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(parse_duration, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {"type": "string", "pattern": f"^(0|({_DURATION.pattern})+)$", "examples": ["30s", "5m"]}


Seconds = Annotated[float, _DurationSchema()]


class _Limits:
    """The bounds of a number, under the names that pydantic uses."""

    def __init__(self, **limits: float) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), **self._limits}


Count = Annotated[int, _Limits(ge=1)]
Size = Annotated[int, _Limits(ge=0)]
Share = Annotated[float, _Limits(ge=0.0, lt=1.0)]
Positive = Annotated[float, _Limits(gt=0.0)]


DRAWN = "drawn"


def drawn() -> Any:
    """A field that `plan` fills and that a scenario must not give, such as the ranks of the target."""
    return field(default=(), metadata={DRAWN: True})


if TYPE_CHECKING:
    from torchaos.harness.record.plan import PlannedFault
    from torchaos.harness.record.record import Record

API = 1  # the version of the names in torchaos.plugin; it grows when a name or its meaning changes
Self = TypeVar("Self")


class Fault:
    """One kind of fault. Subclasses are frozen dataclasses; their fields are the parameters under `with` in a scenario.
    The defaults are those of a fault that hits rank processes and makes no random choice. Each injector must define
    `changes`, `apply` and `felt`, because there is no default for the undo of a fault. The agent loads the module in
    the rank by its path, so at its top the module imports only the standard library and `torchaos.plugin`.

    where: where it can be applied, the best place first
    needs: capabilities, which `torchaos doctor` lists
    hits: what it hits, see `Hits`
    lethal: the target process does not survive it
    lasting: a fault in a rank that stays on until it is undone
    phase: the phase in which it lands if the trigger names a step only
    late: its changes are known only at the Moment, because they depend, for example, on the newest checkpoint
    on_collectives: it hits only the TCP traffic between ranks
    hooks: the agent's hooks that `apply` or `felt` needs
    own_disk: it hits the file system that job.checkpoints.size makes
    family: its subject, such as gpu or numeric; empty: the first part of its name
    imitates: the thing that it only imitates; empty: the fault is real
    replays: the real machine whose messages it repeats, see injectors/shown.yaml
    consent: it can harm more of the host than the job: kmsg, cgroup, clock, host-network
    """

    name: ClassVar[str]
    where: ClassVar[tuple[Where, ...]]
    needs: ClassVar[frozenset[str]] = frozenset()
    hits: ClassVar[Hits] = "ranks"
    lethal: ClassVar[bool] = False
    lasting: ClassVar[bool] = False
    phase: ClassVar[str | None] = None
    late: ClassVar[bool] = False
    on_collectives: ClassVar[bool] = False
    hooks: ClassVar[tuple[str, ...]] = ()
    own_disk: ClassVar[bool] = False
    family: ClassVar[str] = ""
    imitates: ClassVar[str] = ""
    replays: ClassVar[str] = ""
    consent: ClassVar[str] = ""

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        """This injector with every random choice made. Pure; no other method makes random choices."""
        return self

    def changes(self, site: NodeSite) -> Sequence[Handle] | Irreversible:
        """The undo of everything that `apply` may change. Called before `apply`; changes nothing itself."""
        raise NotImplementedError

    def apply(self, site: Any) -> None:
        """Causes the fault. `site`: a RankSite in the rank, or a NodeSite outside."""
        raise NotImplementedError

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        """Additional probes, which run while the fault is on."""
        return ()

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Proof from the record that the fault took effect, or None. Pure. An event of the target's own agent alone is
        no proof."""
        raise NotImplementedError

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
        """Proof from a comparison with runs without faults. For a fault that no event of the run itself can prove."""
        return None

    def asked(self) -> Mapping[str, float]:
        """The requested values of a network fault, such as `delay_ms` or `loss_percent`. They are shown beside the
        measured values."""
        return {}

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]] | None:
        """For `torchaos repro`: signals with the same effect as the fault, as (seconds after the fault, signal number).
        None if no signals have this effect."""
        return None


class Assertion:
    """One question about a run. Subclasses are frozen dataclasses; their fields are the bounds that the scenario
    gives. `needs`: the data that must be collected. `requires`: kinds of data (STEPS, LOSS, SAMPLES or STATE); if a run
    has none of them, the answer is inconclusive. `harm`: what a failure means for the job."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]]
    harm: ClassVar[Harm] = Harm.OTHER
    requires: ClassVar[tuple[Need, ...]] = ()

    @property
    def expects_recovery(self) -> bool:
        """Whether the job is expected to recover from its faults, and not to give up."""
        return True

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        """The answer, from the records alone. Pure. `twins`: the records of the twins, if there are any."""
        raise NotImplementedError

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """The answer for a job of several replicas. A subclass may use one of the functions of
        analysis/replica_verdict.py as this method."""
        return inconclusive(
            f"{self.name} judges the ranks of one torchrun only, not a job of {run.plan.job.replicas} replicas"
        )


class Condition:
    """A statement about the run that is true or false, judged from the events so far. Subclasses are frozen
    dataclasses; their fields come from the scenario. `about_job`: whether it is about the job, and not about the
    machine; used for stop conditions."""

    about_job: ClassVar[bool] = True

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        """Whether the condition is true now. None if that is not known (yet). Pure. `now_s`: seconds of
        CLOCK_MONOTONIC."""
        raise NotImplementedError

    def probes(self, at: Watched) -> Sequence[Probe]:
        """The probes that the condition needs. Equal probes of several conditions run only once."""
        return ()

    @staticmethod
    def of_faults(params: Mapping[str, Any], faults: Sequence[PlannedFault]) -> Mapping[str, Any]:
        """Parameters that depend on the planned faults. They replace the parameters in the scenario. Raises UsageError
        if a parameter does not fit the faults."""
        return {}
