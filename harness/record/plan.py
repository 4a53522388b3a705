"""The plan of a run, made before anything is done: targets, moments, parameters, needs.

A Plan is data (JSON): `run` executes it, a dry run prints it, a replay reads it back. All random choices are already
made, each fault with a stream of its own, so that removing a fault changes no other."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Mapping

from pydantic import ConfigDict

from torchaos.harness.agent.plan import Moment
from torchaos.harness.contracts import Need, Target, Where
from torchaos.harness.machine.disk import owner_only
from torchaos.harness.record.secrecy import mask_env, mask_words
from torchaos.harness.record.stored import read_as

# Why a fault was missed whose trigger had not come by then.
ENDED_BEFORE = "the run ended before its trigger was reached"


@dataclass(frozen=True)
class After:
    """A trigger that is seen from outside: a time after the launch, or after something happened to another fault."""

    delay_s: float = 0.0
    fault: str | None = None  # None: after the job's launch
    state: str = "applied"  # applied, felt, recovered, rolled_back
    checkpoints: int = 0  # and this many checkpoints have been saved since
    not_before_s: float = 0.0  # beside `fault`: and so long after the launch
    lethal: bool = False  # who is hit by that fault dies of it, at once or a while later
    lasting: bool = False  # that fault is taken back while the run goes on, and has to be before anything has recovered


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
    checkpoints_size: int | None = None  # bytes, of a file system of its own that is made there
    endpoints: Mapping[str, str] = field(default_factory=dict)  # host:port by name
    log: Mapping[str, Any] | None = None
    resubmit_times: int = 0
    resubmit_delay_s: float = 0.0
    attach_pid: int | None = None
    replicas: int = 1  # each a torchrun of its own, with an equal share of the ranks; each counts as a node
    container: Mapping[str, Any] = field(
        default_factory=dict
    )  # what the nodes are made from, where they are containers
    busy_nodes: int = 0  # how many have ranks at first (the others are spare); 0: all have

    @property
    def per_node(self) -> int:
        """The number of ranks on a node that has any."""
        return max(1, self.world_size // (self.busy_nodes or self.nodes))


@dataclass(frozen=True)
class Named:
    """An assertion or a condition by name, with its parameters."""

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
    until: tuple[Named, ...] = ()  # all of them together end the run on purpose
    launcher: str = "local"
    max_ranks: int | None = None
    max_nodes: int | None = None
    max_percent: float | None = None  # of the ranks
    max_duration_s: float | None = None  # of each fault
    never_ranks: tuple[int, ...] = ()
    never_nodes: tuple[int, ...] = ()
    consent: tuple[str, ...] = ()  # to what can hurt the host, given by scenario and command line
    twin: Mapping[str, Any] = field(default_factory=dict)  # {"runs": how many at most}; empty: none wanted
    hooks: tuple[str, ...] = ()
    collect: tuple[Need, ...] = ()  # what the assertions want to see
    needs: tuple[str, ...] = ()  # capabilities
    version: int = 1

    # Also of its parts: the keys tell triggers apart. Python 3.10 can't evaluate a ClassVar without its type.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def masked(self) -> Plan:
        """The plan as it may be shown and kept, without the secrets in the job's command and environment. The plan
        itself is what is run."""
        job = replace(self.job, command=mask_words(self.job.command), env=mask_env(self.job.env))
        return replace(self, job=job)

    def write(self, path: Path) -> None:
        """Writes the masked plan, readable only by its owner."""
        with open(path, "w", opener=owner_only) as file:
            file.write(self.masked().to_json() + "\n")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Reads a plan. Raises OSError if there is none, ValueError if it is damaged."""
        return read_as(cls, path.read_bytes())


def stream(seed: int, fault: str) -> random.Random:
    """The random stream of one fault: a function of only the seed and the fault's id."""
    digest = hashlib.blake2b(f"{seed}/{fault}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))
