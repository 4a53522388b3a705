"""The plan that the agent gets from the harness: its hooks, the faults for this rank, and the Moments of the faults.
Standard library only."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Mapping

from .wire import Phase


@dataclass(frozen=True)
class Collectives:
    """A filter for collectives. A field that is None accepts every value."""

    operation: str | None = None  # one of collective_stamps.OPS, such as all_reduce
    group: str | None = None  # the process group, by its name or its description
    min_bytes: int | None = None  # bytes of the larger of input and output on this rank
    max_bytes: int | None = None


@dataclass(frozen=True)
class Moment:
    """A point in a rank that only the agent can see: the nth time that a phase of a step is entered in an attempt. The
    *pacer* is the rank in which the fault fires at this point or, for a fault from outside, the rank that is held
    there."""

    pacer: int
    step: int | None  # global step during which it fires, counted from 1; None: any
    phase: Phase | None  # None: at the start of the step
    attempt: int | None = None  # None: any
    nth: int = 1  # the nth time that the phase is entered in that step
    hold_s: float = 10.0  # seconds after which a held rank goes on by itself
    collectives: Collectives | None = None  # in the phase `collective`, only these collectives count for `nth`

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Moment:
        phase, collectives = raw["phase"], raw.get("collectives")
        return cls(**{
            **raw, "phase": None if phase is None else Phase(phase),
            "collectives": None if collectives is None else Collectives(**collectives),
        })  # fmt: skip


@dataclass(frozen=True)
class RankFault:
    """What a rank does at a Moment. It applies the class `injector` of the file `source`; or, if both are None, it is
    held until a fault from outside is applied."""

    fault: str
    when: Moment
    page: str  # path of the control page
    source: str | None = None
    injector: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    lease_s: float = 3600.0  # seconds after which a lasting fault ends by itself

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RankFault:
        return cls(**{**raw, "when": Moment.from_dict(raw["when"])})


_IN_FILE = {"faults": "orders"}  # keys whose names differ in the file of an AgentPlan


@dataclass(frozen=True)
class AgentPlan:
    """The contents of the file that `ENV_PLAN` names. The agent reads it when it starts."""

    run_id: str
    events: str  # folder of the event files
    hooks: tuple[str, ...]
    faults: tuple[RankFault, ...] = ()
    checkpoints: str | None = None
    # How many bytes this rank may write about samples, see agent/training/step_events.py. None: no bound.
    sample_bytes: int | None = None

    def write(self, path: Path) -> None:
        """Writes the plan to `path`, readable only by its owner."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w") as file:
            json.dump({_IN_FILE.get(name, name): value for name, value in asdict(self).items()}, file, indent=1)

    @classmethod
    def read(cls, path: str) -> AgentPlan:
        raw = json.loads(Path(path).read_text())
        return cls(
            raw["run_id"], raw["events"], tuple(raw["hooks"]),
            tuple(map(RankFault.from_dict, raw[_IN_FILE["faults"]])), raw.get("checkpoints"),
            raw.get("sample_bytes"),
        )  # fmt: skip
