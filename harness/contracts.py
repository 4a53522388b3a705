"""The shapes that everything else is built on. A new fault, assertion, launcher, probe or condition is a class
that fits one of them; none of them names a particular one.

Arrows point one way: injectors and assertions import the harness, never the other way round.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Literal, Mapping, Protocol, Sequence, runtime_checkable

from torchaos.harness.agent.wire import Event, Kind, Phase

if TYPE_CHECKING:
    from torchaos.harness.mechanics.network.link import Link
    from torchaos.harness.mechanics.proxy.server import Endpoint
    from torchaos.harness.record.plan import PlannedFault
    from torchaos.harness.record.record import Record
    from torchaos.harness.undo.touches import Touches

Where = Literal["rank", "node"]
# as_targeted: agents when the target names nodes, else ranks; the others: no process that can be named beforehand
Hits = Literal["ranks", "agents", "as_targeted", "nodes", "files", "endpoints"]
Emit = Callable[[Kind, Mapping[str, Any]], Event]


class ChaosError(Exception):
    """An error whose text is meant for the user: where, what, and what to do. Never shown as a traceback."""

    exit_code = 5


class UsageError(ChaosError):
    """The command line, the scenario or the machine can't do what is asked."""

    exit_code = 3


@dataclass(frozen=True)
class Target:
    """Whom a fault hits, resolved: ranks (global), or whole nodes by index; neither of files and endpoints."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Irreversible:
    """Why a fault can't be taken back; what `rollback` then means is handing the job to its supervisor."""

    why: str


@dataclass(frozen=True)
class Evidence:
    """Proof that a fault took effect: a sentence, and the (source, seq) of the events that it rests on."""

    what: str
    events: tuple[tuple[str, int], ...] = ()


@runtime_checkable
class Handle(Protocol):
    """How to take one change back, as data: a frozen dataclass whose fields are JSON. Few, closed, in undo/handles."""

    kind: ClassVar[str]

    def touches(self) -> Touches:
        """What it may touch: checked before a fault lands, and before it is healed from a log."""
        ...

    def restore(self) -> None:
        """Set the known-good state. Repeatable; spares strangers (checks identity first)."""
        ...

    def restored(self) -> bool:
        """Whether the known-good state is there, verified by identity and not by absence alone."""
        ...


class Site(Protocol):
    """Where a fault is applied, as every fault sees it. It is a `RankSite` (agent/site.py) in a rank, where the process
    is the target itself, and a `NodeSite` outside."""

    @property
    def fault(self) -> str:
        """The fault's id."""
        ...

    @property
    def pids(self) -> Sequence[int]:
        """The target processes."""
        ...

    @property
    def step(self) -> int | None:
        """The global step at the Moment, if it is known."""
        ...

    @property
    def phase(self) -> Phase | None: ...

    def signal(self, number: int) -> None:
        """Send a signal to each target process, by pidfd if it is another process."""
        ...

    def emit(self, kind: Kind, data: Mapping[str, Any]) -> Event: ...


class NodeSite(Site, Protocol):
    """Where a fault is applied from outside, by the harness."""

    @property
    def nodes(self) -> Sequence[LiveNode]:
        """The target nodes, for a fault that hits nodes."""
        ...

    @property
    def cluster(self) -> Sequence[LiveNode]:
        """All nodes of the job."""
        ...

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """The job's endpoints that a proxy stands before, by name, for a fault that hits endpoints."""
        ...

    @property
    def checkpoints(self) -> Path | None:
        """The folder that the scenario names as the job's checkpoints: the only files that a fault may touch beside
        those in the run's own folder."""
        ...

    @property
    def guarded(self) -> Sequence[Handle]:
        """What `changes` has returned: the way back that is on disk. Empty before `apply` runs."""
        ...

    @property
    def undo_copies(self) -> Path:
        """Where `File.of` saves what it will put back."""
        ...

    def check(self, changes: Sequence[Handle]) -> None:
        """Raises TargetGone if a target is another process by now, or one of these handles is not guarded."""
        ...

    def release(self) -> None:
        """Let a rank that is held at the Moment go on now, before `apply` returns."""
        ...

    def wait_for_exit(self, timeout_s: float) -> Sequence[int]:
        """Wait until the targets are gone; the pids of those that are still there after the time."""
        ...


@runtime_checkable
class Injector(Protocol):
    """One kind of fault. A frozen dataclass: its fields are the parameters that the scenario gives under `with`.
    `Fault` in agent/fault.py has the defaults, and says what each attribute means.

    The module of a fault in the rank imports only the standard library and `torchaos.plugin` when it is loaded, since
    the agent loads it by path.
    """

    name: ClassVar[str]
    where: ClassVar[tuple[Where, ...]]  # where it can be applied, best first
    needs: ClassVar[frozenset[str]]  # capabilities of the machine and of the launch, see running/capabilities.py
    lethal: ClassVar[bool]
    hits: ClassVar[Hits]
    # What a class does not declare from here on, it gets from `Fault` when the registry loads it.
    lasting: ClassVar[bool]
    phase: ClassVar[str | None]
    late: ClassVar[bool]
    family: ClassVar[str]
    consent: ClassVar[str]
    hooks: ClassVar[tuple[str, ...]]
    on_collectives: ClassVar[bool]
    own_disk: ClassVar[bool]

    def plan(self, target: Target, draw: random.Random) -> Injector:
        """Itself with every random choice made. Pure; all randomness is spent here."""
        ...

    def changes(self, site: NodeSite) -> Sequence[Handle] | Irreversible:
        """Everything that `apply` may change, read before it does. Changes nothing."""
        ...

    def apply(self, site: Any) -> None:
        """`site` is a RankSite in the rank, and a NodeSite outside."""
        ...

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        """What to observe while the fault is on."""
        ...

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Proof from the journal that the fault took effect, or None. Pure. What the agent says alone is no proof."""
        ...

    def felt_by_twin(self, record: Record, twins: Sequence[Record], fault: str) -> Evidence | None: ...

    def asked(self) -> Mapping[str, float]: ...

    def signals(self, duration_s: float | None) -> Sequence[tuple[float, int]] | None: ...


@dataclass(frozen=True)
class JobSpec:
    """What a launcher needs to start the job once. Paths are absolute; placeholders are filled in."""

    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]  # complete
    log: Path  # where stdout and stderr go
    submission: int  # from 0: how often the job has been submitted before
    nodes: int = 1  # for a launcher that makes its nodes
    own_env: Mapping[str, str] = field(default_factory=dict)  # of `env`, what this machine's environment does not have
    checkpoints: Path | None = None  # where the job keeps them
    container: Mapping[str, Any] = field(default_factory=dict)  # of nodes that are containers, see the grammar
    replicas: int = 1  # so many commands side by side, a torchrun of its own each
    replica_ranks: int = 0  # of each of them, where there are several
    busy_nodes: int = 0  # so many nodes are started at once, and the others when all ranks are up; 0: all at once


@dataclass(frozen=True)
class RankProcess:
    """One live rank: (pid, start_ticks) names the process for good."""

    rank: int
    local_rank: int
    node: int
    pid: int
    start_ticks: int
    attempt: int
    world_size: int
    gpu: int = 0  # NVML's index of the GPU that it uses, as far as its environment tells
    inner_pid: int = 0  # in the pid namespace of its own that a container gives it; 0: it has none

    @property
    def own_pid(self) -> int:
        """As the rank itself sees it."""
        return self.inner_pid or self.pid


class Node(Protocol):
    """One machine, or what stands for one (a network namespace, a container)."""

    @property
    def index(self) -> int: ...

    @property
    def env(self) -> Mapping[str, str]:
        """What the job's environment has on this node beside the spec's; the launcher has heeded what the user set."""
        ...

    @property
    def link(self) -> Link | None:
        """Its link to the other nodes; None where nothing can be done to that."""
        ...

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command with the prefix that runs it on this node: none, nsenter, docker exec, srun."""
        ...

    def host_pid(self, pid: int) -> int | None:
        """The pid in the harness's namespace of a pid that the node reports."""
        ...


class LiveNode(Protocol):
    """A node of the running job, as a fault sees it."""

    @property
    def node(self) -> Node: ...

    @property
    def run_id(self) -> str:
        """The mark of the job's processes; that of a fault's helper begins with it."""
        ...

    def processes(self) -> Mapping[int, int]:
        """The job's processes on this node, as they are now: start times (clock ticks since boot) by pid."""
        ...

    def start_again(self) -> int:
        """Start the job's command on this node once more, and return its pid. Raises ChaosError when the job is over,
        or the command still runs."""
        ...

    def keep_place(self) -> None:
        """The node will come back: the job is not over before that, whatever becomes of the others."""
        ...


class Launcher(Protocol):
    """All that a platform writes. The rest (ranks, attempts, logs, resubmission) is in running/launchers/job.py. What
    has a value here is optional: the registry gives it to a class that lacks it."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()  # capabilities of the machine
    cannot: ClassVar[Mapping[str, str]] = {}  # by injector, or by what it hits: what to write instead
    replicas: ClassVar[bool] = False  # it starts the replicas of job.replicas, each with a torchrun of its own
    sets_rendezvous: ClassVar[bool] = False  # its nodes' environment tells torchrun where they meet

    @staticmethod
    def needs_of(command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
        """Capabilities that only this job needs. Raises UsageError if the launcher can't launch it."""
        return frozenset()

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        """What `create` will make, so that it is guarded before it is made."""
        ...

    def create(self, spec: JobSpec) -> Sequence[Node]: ...


class Probe(Protocol):
    """Observes from outside; only emits events. `sample` is called every `period_s` seconds."""

    period_s: float

    def sample(self, emit: Emit) -> None: ...


@dataclass(frozen=True)
class Watched:
    """Where the probes of conditions look. `mark` is what a command that they start carries as its run id."""

    run_dir: Path
    checkpoints: Path | None
    mark: str
    ended: threading.Event = field(default_factory=threading.Event)


class Condition(Protocol):
    """Something that holds or not, seen from the events so far. A frozen dataclass: fields come from the scenario. All
    but `holds` is optional: the registry gives it to a class that lacks it."""

    about_job: ClassVar[bool] = True  # as a stop condition it says something about the job, and not about the machine

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        """Pure. `now_s` is CLOCK_MONOTONIC. None: can't be told (yet)."""
        ...

    def probes(self, at: Watched) -> Sequence[Probe]:
        """What has to be looked at while the run lasts. Equal probes of several conditions run once."""
        return ()

    @staticmethod
    def of_faults(params: Mapping[str, Any], faults: Sequence[PlannedFault]) -> Mapping[str, Any]:
        """Parameters that follow from the planned faults, and replace those of the scenario. Raises UsageError."""
        return {}


class CheckpointFormat(Protocol):
    """How checkpoints of one format are recognised and read. Inherit from `Format` in checkpoints/formats/format.py: it
    has a default for everything but the name."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def is_folder(self, files: Any, folder: str, names: Sequence[str]) -> bool: ...

    def read_file(self, files: Any, path: str, size: int, into: Any, prefix: str = "") -> None: ...

    def read_folder(self, files: Any, folder: str, into: Any, prefix: str = "") -> None: ...


class Need(str, Enum):
    """What an assertion needs to be collected; each switches hooks or stages on."""

    STEPS = "steps"
    LOSS = "loss"
    SAMPLES = "samples"
    CHECKPOINTS = "checkpoints"  # saves and loads as events
    INVENTORY = "inventory"  # what lies on disk afterwards, tensor by tensor
    TWIN = "twin"
    STATE = "state"  # a check sum of the parameters after each step, and the gradient's norm
    HANGS = "hangs"  # observed from outside: suspected, declared, and who is to blame
    LEFTOVERS = "leftovers"  # processes, ports and shared memory that are still there when the job has ended
    COLLECTIVES = "collectives"  # when each began and ended, in the files of agent/stamps.py


class Outcome(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


class Harm(str, Enum):
    """What it means for a job when an assertion fails."""

    WRONG_RESULT = "wrong result"  # what it computes or keeps is not what it would have been
    LOST_WORK = "lost work"  # it went on from an older checkpoint than it had
    SLOW = "slow"  # it took longer, or more restarts, than allowed
    REACTION = "reaction"  # nobody noticed, or did what was to be done
    ENDING = "ending"  # it did not end as it should
    OTHER = "other"


class What(str, Enum):
    """In what a run may differ from its twin, or from its first execution of a step."""

    LOSS = "loss"
    LOSSES = "number of losses"  # backwards in a step
    RATE = "learning rate"
    SAMPLES = "samples"
    PARAMETERS = "parameters"  # after the step
    REPLICAS = "replicas"  # ranks that should hold the same parameters, after the step
    LOADED = "loaded checkpoint"  # of that step, with wrong contents
    SAVED = "saved checkpoint"  # of that step
    ABSENT = "absent step"  # it never took place
    ENDING = "ending"  # the job did not come back, or did not end as it should; the step is the last one seen


@dataclass(frozen=True)
class First:
    """The first thing that was not as it should be, and its global step: what tells a cause from its consequences."""

    what: What
    step: int


@dataclass(frozen=True)
class Finding:
    """What one assertion says. `reason` is one or two sentences that a person understands without the code."""

    outcome: Outcome
    reason: str
    measured: Mapping[str, Any] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)
    first: First | None = None
    cause: str = ""  # the likeliest, in a few words; the reason has it too


def passed(reason: str, **measured: Any) -> Finding:
    return Finding(Outcome.PASSED, reason, measured)


def failed(reason: str, first: First | None = None, /, **measured: Any) -> Finding:
    return Finding(Outcome.FAILED, reason, measured, first=first)


def inconclusive(reason: str, **measured: Any) -> Finding:
    return Finding(Outcome.INCONCLUSIVE, reason, measured)


@runtime_checkable
class Assertion(Protocol):
    """One question about a run. A frozen dataclass: its fields are the bounds that the scenario gives. Optional are
    `harm`, `expects_recovery` and `judge_replicas`: the registry gives them to a class that lacks them."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]]
    harm: ClassVar[Harm] = Harm.OTHER  # what it means when it fails

    @property
    def expects_recovery(self) -> bool:
        """Whether the job is meant to recover from its faults, and not to give up."""
        return True

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        """Pure: reads the records and nothing else."""
        ...

    def judge_replicas(self, run: Record, twins: Sequence[Record]) -> Finding:
        """The same for a job of several replicas; one of the functions of judging/replicas.py may be it."""
        return inconclusive(
            f"{self.name} knows one torchrun's ranks, and can't judge a job of {run.plan.job.replicas} replicas"
        )
