"""What is going to happen, decided before anything does: targets, moments, parameters, needs.

A Plan is data (JSON): `run` executes it, a dry run prints it, a replay reads it back. Everything random has been
drawn by then, each fault from a stream of its own, so that taking one fault out changes no other.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Mapping

from torchaos.harness.agent.wire import Moment, Phase
from torchaos.harness.contracts import Need, Target, Where


@dataclass(frozen=True)
class After:
    """A trigger that is seen from outside: so long after the launch, or after something happened to another fault."""

    delay_s: float = 0.0
    fault: str | None = None  # None: after the job's launch
    state: str = "applied"  # applied, felt, recovered, rolled_back
    checkpoints: int = 0  # and this many checkpoints have been saved since


@dataclass(frozen=True)
class PlannedFault:
    id: str
    inject: str
    where: Where
    target: Target
    trigger: Moment | After
    params: Mapping[str, Any]
    source: str  # the injector's file
    injector: str  # and class
    duration_s: float | None = None  # taken back after this long; None: when the run ends
    times: int = 1


@dataclass(frozen=True)
class PlannedJob:
    command: tuple[str, ...]  # placeholders but `{run}` filled in
    cwd: str
    env: Mapping[str, str]  # what the scenario adds
    world_size: int
    nodes: int
    timeout_s: float
    checkpoints: str | None = None
    log: Mapping[str, Any] | None = None
    resubmit_times: int = 0
    resubmit_delay_s: float = 0.0
    attach_pid: int | None = None


@dataclass(frozen=True)
class Named:
    """A thing with bounds that the registry finds by name: an assertion or a condition."""

    name: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    scenario: str
    description: str
    seed: int
    job: PlannedJob
    faults: tuple[PlannedFault, ...]
    asserts: tuple[Named, ...]
    steady_state: tuple[Named, ...] = ()
    stop: tuple[Named, ...] = ()
    launcher: str = "local"
    max_ranks: int | None = None
    max_nodes: int | None = None
    twin: Mapping[str, Any] = field(default_factory=dict)  # {"runs": how many at most}; empty: none wanted
    hooks: tuple[str, ...] = ()
    collect: tuple[Need, ...] = ()  # what the assertions want to see
    needs: tuple[str, ...] = ()  # capabilities
    version: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def write(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n")

    @classmethod
    def read(cls, path: Path) -> Plan:
        raw = json.loads(path.read_text())
        return cls(**{
            **raw, "job": PlannedJob(**{**raw["job"], "command": tuple(raw["job"]["command"])}),
            "faults": tuple(_fault(fault) for fault in raw["faults"]),
            **{name: tuple(Named(**item) for item in raw[name]) for name in ("asserts", "steady_state", "stop")},
            "hooks": tuple(raw["hooks"]), "needs": tuple(raw["needs"]),
            "collect": tuple(Need(one) for one in raw["collect"]),
        })  # fmt: skip


def _fault(raw: dict[str, Any]) -> PlannedFault:
    trigger = raw["trigger"]
    when: Moment | After
    if "pacer" in trigger:
        when = Moment(**{**trigger, "phase": None if trigger["phase"] is None else Phase(trigger["phase"])})
    else:
        when = After(**trigger)
    target = Target(tuple(raw["target"]["ranks"]), tuple(raw["target"]["nodes"]))
    return PlannedFault(**{**raw, "target": target, "trigger": when})


def stream(seed: int, fault: str) -> random.Random:
    """The random stream of one fault: a function of the seed and the fault's id alone."""
    digest = hashlib.blake2b(f"{seed}/{fault}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))
