"""What the agent is told: its orders, and the moments at which they fire. Standard library alone, as `wire`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Mapping

from .wire import Phase


@dataclass(frozen=True)
class Collectives:
    """Which collectives are meant; None: any."""

    operation: str | None = None  # one of stamps.OPS, such as all_reduce
    group: str | None = None  # the process group, by its name or its description
    min_bytes: int | None = None  # the larger of what goes in and what comes out on this rank
    max_bytes: int | None = None


@dataclass(frozen=True)
class Moment:
    """A point that only the agent sees. The pacer is the one rank that fires or is held there."""

    pacer: int
    step: int | None  # global, from 1: the step during which it fires; None: any
    phase: Phase | None  # None: at the start of the step
    attempt: int | None = None  # None: any
    nth: int = 1  # the nth time that the phase is entered in that step
    hold_s: float = 10.0  # the rank goes on by itself after this long
    collectives: Collectives | None = None  # in the phase `collective`, `nth` counts these alone

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Moment:
        phase, which = raw["phase"], raw.get("collectives")
        return cls(**{
            **raw, "phase": None if phase is None else Phase(phase),
            "collectives": None if which is None else Collectives(**which),
        })  # fmt: skip


@dataclass(frozen=True)
class Order:
    """At a Moment: apply the injector `injector` of the file `source`, or (None) hold for one outside."""

    fault: str
    when: Moment
    page: str  # path of the control page
    source: str | None = None
    injector: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    lease_s: float = 3600.0  # a fault that lasts ends by itself after this long, whoever is left to take it back

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Order:
        return cls(**{**raw, "when": Moment.from_dict(raw["when"])})


@dataclass(frozen=True)
class AgentPlan:
    """What the agent reads when it starts: the file that `ENV_PLAN` names."""

    run_id: str
    events: str  # folder of the event files
    hooks: tuple[str, ...]
    orders: tuple[Order, ...] = ()
    checkpoints: str | None = None

    def write(self, path: Path) -> None:
        """Readable by its owner alone."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w") as file:
            json.dump(asdict(self), file, indent=1)

    @classmethod
    def read(cls, path: str) -> AgentPlan:
        raw = json.loads(Path(path).read_text())
        return cls(
            raw["run_id"], raw["events"], tuple(raw["hooks"]),
            tuple(Order.from_dict(order) for order in raw["orders"]), raw.get("checkpoints"),
        )  # fmt: skip
