"""A job: how it is started, its nodes and ranks, the faults that hit it and where they are applied, the probes that
observe it, and the formats of its checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torchaos.harness.protocol.wire import Event, Kind, Phase

# A fault: its target, how it is applied and undone, and what proves that it was felt.

Where = Literal["rank", "node"]
# What a fault hits. agents: torchrun. as_targeted: torchrun if the target names nodes, else ranks. ranks_or_node:
# ranks, and a process of a node without ranks. nodes, files, endpoints: no process is the target.
Hits = Literal["ranks", "agents", "as_targeted", "ranks_or_node", "nodes", "files", "endpoints"]


@dataclass(frozen=True)
class Target:
    """The target of a fault, after placeholders and random choices: global ranks, or whole nodes by index. Both are
    empty for a fault that hits files or endpoints."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Irreversible:
    """A change that can't be undone, and the reason. The job itself must recover from it."""

    why: str


@dataclass(frozen=True)
class Evidence:
    """Proof that a fault took effect: a sentence, and the events on which it is based, each as (source, seq)."""

    what: str
    events: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, what: str, *events: Event) -> Evidence:
        return cls(what, tuple((event.source, event.seq) for event in events))


class Touches(Protocol):
    """What a handle may change, see rollback/file_handles.py."""

    @property
    def process(self) -> tuple[int, int] | None: ...

    @property
    def run_id(self) -> str | None: ...

    @property
    def network(self) -> Any: ...

    @property
    def path(self) -> str | None: ...

    @property
    def own(self) -> str | None: ...

    @property
    def marked(self) -> str | None: ...


@runtime_checkable
class Handle(Protocol):
    """The undo of one change, as data: a frozen dataclass whose fields are JSON. All kinds of handles are in
    rollback/handles.py."""

    kind: ClassVar[str]

    def touches(self) -> Touches:
        """The processes, files and other things that the undo may change. They are checked before the fault is applied,
        and before the undo."""

    def undo(self) -> None:
        """Undoes the change: brings back the state from before. May be called again. First checks the identity of each
        thing, and changes nothing else."""

    def is_undone(self) -> bool:
        """Verifies the undo: whether the state is as before the change. The identity of the thing is checked, too,
        because a missing thing proves nothing."""


# A job: how it is started, its nodes and ranks, the places at which faults are applied to it, the probes that observe
# it, and the formats of its checkpoints.


@dataclass(frozen=True)
class JobSpec:
    """Everything that a launcher needs to start the job once. Paths are absolute, and placeholders are filled in."""

    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]  # all variables of the job
    log: Path  # where stdout and stderr go
    submission: int  # from 0: how often the job has been submitted before
    nodes: int = 1  # how many nodes the launcher makes
    own_env: Mapping[str, str] = field(default_factory=dict)  # the part of `env` that differs from this machine's
    checkpoints: Path | None = None  # the folder of the job's checkpoints
    replicas: int = 1  # how many commands run at the same time, each with its own torchrun
    replica_ranks: int = 0  # ranks of each replica, if there are several replicas
    # How many nodes start at once; the others (standby) start when all ranks are up; 0: all start at once.
    busy_nodes: int = 0
    timeout_s: float = 0.0  # the job is ended after this time
    local: Path | None = None  # the path at which each node has a folder of its own


@dataclass(frozen=True)
class RankProcess:
    """One live rank. `pid` and `start_ticks` together identify the process, because the pid may be used again later."""

    rank: int
    local_rank: int
    node: int
    pid: int
    start_ticks: int
    attempt: int
    world_size: int
    gpu: int | None = None  # NVML's index of its GPU, if its environment shows it
    inner_pid: int = 0  # its pid in the container's pid namespace; 0: it is in no container

    @property
    def own_pid(self) -> int:
        """The pid as the rank itself sees it."""
        return self.inner_pid or self.pid


class Node(Protocol):
    """One machine, or a network namespace or container that stands for a machine."""

    @property
    def index(self) -> int: ...

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that this node adds to the job's environment. If the user has set a variable, the user's value is
        kept."""

    @property
    def link(self) -> Any:
        """The node's link to the other nodes, see fault_drivers/network/links.py. None if faults can't change it."""

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command with the prefix that runs it on this node, such as nsenter, docker exec or srun."""

    def host_pid(self, pid: int) -> int | None:
        """The pid, in the namespace of the harness, of a process for which this node reported `pid`. None if not
        known."""


class LiveNode(Protocol):
    """A node of the running job, as a fault sees it."""

    @property
    def node(self) -> Node: ...

    @property
    def run_id(self) -> str:
        """The mark in the environment of the job's processes. The marks of a fault's helper processes begin with it."""

    def processes(self) -> Mapping[int, int]:
        """The job's processes that run on this node now: start times (clock ticks since boot) by pid."""

    def start_again(self) -> int:
        """Starts the job's command on this node once more, and returns its pid. Raises ChaosError if the job is over,
        or if the command still runs."""

    def lose_disk(self) -> None:
        """Empties the folder that this node has of its own (job.checkpoints.local), if it has one."""

    def keep_place(self) -> None:
        """Announces that the node will come back. Until then the job counts as running, even if all other nodes end."""


@dataclass(frozen=True)
class Capability:
    """Something that a machine may have, and how to find out."""

    used_for: str
    find: Callable[[], str | None]  # what was found, such as a path or version; None: nothing
    remedy: str  # how to get it


class Launcher(Protocol):
    """The part of a launcher that differs between platforms. The common part (ranks, attempts, logs, submissions) is in
    harness/running/launchers/. Attributes with a value here, and methods with a body here, are optional. If the class
    is a dataclass, its fields are its settings: keys of a scenario's job. The planner makes one object from the
    settings and asks it about the scenario; the run makes another object from the settings in the plan."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()  # capabilities of the machine
    checks: ClassVar[Mapping[str, Capability]] = {}  # the capabilities that this launcher brings, by name
    offers: ClassVar[frozenset[str]] = frozenset()  # capabilities that its nodes have even if this machine has not
    # Faults that it can't apply. Keys: injectors, kinds of targets, or capabilities; values: what to write instead.
    cannot: ClassVar[Mapping[str, str]] = {}
    # What its nodes have that faults of other launchers lack. Keys: capabilities; values: such a fault, in words.
    makes: ClassVar[Mapping[str, str]] = {}
    here: ClassVar[bool] = False  # its ranks see the folders of this machine, and its Python
    in_host_network: ClassVar[bool] = False  # its ranks are in the network of this machine
    local_disks: ClassVar[bool] = False  # each of its nodes can have a folder of its own
    replicas: ClassVar[bool] = False  # it can start the replicas of job.replicas, each with its own torchrun
    sets_rendezvous: ClassVar[bool] = False  # the environment of its nodes has the rendezvous address for torchrun
    on_nodes: ClassVar[bool] = False  # its nodes are other machines: it is a `RemoteLauncher`
    own_folders: ClassVar[bool] = False  # its nodes have folders of their own; job.cwd, if given, is one of those

    @property
    def host_programs(self) -> bool:
        """Whether the nodes run the programs of this machine. Otherwise the command is not looked for here."""
        return True

    @property
    def sources_elsewhere(self) -> str:
        """Why the files of this machine are not the job's sources, as a clause. Empty if they are."""
        return ""

    @property
    def node_count(self) -> int | None:
        """The number of nodes, if the settings give it."""
        return None

    @property
    def attached(self) -> str:
        """The job that runs already, in words, if the launcher attaches to one. Otherwise empty."""
        return ""

    @staticmethod
    def settle(settings: dict[str, Any], absolute: Callable[[str], str]) -> None:
        """Replaces the paths in the settings (as the YAML file has them) by `absolute(path)`."""
        return

    def plan(self, nodes: int, cwd: str) -> Launcher:
        """This launcher with everything that the plan must hold. `nodes`: how many nodes the job has. `cwd`: job.cwd,
        if the scenario gives it; otherwise empty. Raises UsageError if the settings do not fit."""
        return self

    def refuses(self, injector: Any) -> str:
        """Why the settings make this fault impossible, and what to write instead. Empty if they do not."""
        return ""

    @staticmethod
    def needs_of(command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
        """The capabilities that only this job needs. Raises UsageError if the launcher can't start the job."""
        return frozenset()

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        """The handles of everything that `create` will make. They are put on disk before `create` is called."""

    def create(self, spec: JobSpec) -> Sequence[Node]: ...

    def give_up(self) -> None:
        """Called from another thread when the run ends: a `create` that waits for nodes must soon raise ChaosError."""
        return


class RemoteLauncher(Launcher, Protocol):
    """A launcher whose nodes are other machines. On each node, `torchaos exec` wraps the job's command and does the
    work of torchaos. `argv` of a node starts a small helper beside that process."""

    on_nodes: ClassVar[bool] = True
    # Whether the nodes of `create` see the run directory of this machine. Otherwise their agents send what they write.
    shares_folder: bool = True

    @property
    def sources_elsewhere(self) -> str:
        return "the job runs on other machines"

    def commands(self, spec: JobSpec, nodes: Sequence[Node], wrapper: Sequence[str]) -> Sequence[Sequence[str]]:
        """The commands that start the job; they run on this machine. They end when the job ends, with an exit code
        other than 0 if the command of a node failed. On each node they run `wrapper`, to which the launcher adds --node
        or --hosts, followed by the command of the spec."""

    def exit_code(self, node: Node) -> int | None:
        """For a job that was running before torchaos: the exit code of the job's part on a node, if that node ended
        together with its part. None if this is not known."""
        return None

    def gone(self, node: Node) -> bool:
        """Whether a node does not exist any more. Then nothing is left of what faults changed on it."""
        return False


class Site(Protocol):
    """The place at which a fault is applied: a `RankSite` (in harness/agent) inside a rank, or a `NodeSite` outside.
    Inside a rank, the target process is the rank itself."""

    @property
    def fault(self) -> str:
        """The id of the fault that is applied."""

    @property
    def pids(self) -> Sequence[int]:
        """The target processes."""

    @property
    def step(self) -> int | None:
        """The global step in which the fault is applied, if it is known."""

    @property
    def phase(self) -> Phase | None: ...

    def signal(self, number: int) -> None:
        """Sends a signal to each target process."""

    def emit(self, kind: Kind, data: Mapping[str, Any]) -> Event: ...


class NodeSite(Site, Protocol):
    """The place at which the harness applies a fault from outside."""

    @property
    def nodes(self) -> Sequence[LiveNode]:
        """The target nodes, for a fault that hits nodes."""

    @property
    def cluster(self) -> Sequence[LiveNode]:
        """All nodes of the job."""

    @property
    def endpoints(self) -> Mapping[str, Any]:
        """The job's endpoints that have a proxy (fault_drivers/proxy.py), by name. Empty if the fault hits no
        endpoint."""

    @property
    def checkpoints(self) -> Path | None:
        """The folder of the job's checkpoints, as the scenario gives it. Apart from files in the run's own folder, a
        fault may touch only files in this folder."""

    @property
    def undo_on_disk(self) -> Sequence[Handle]:
        """The handles that `changes` returned, once they are on disk. Empty before `apply` is called."""

    @property
    def undo_copies(self) -> Path:
        """The folder for copies of files that a fault changes. `File.of` saves them there."""

    def check(self, changes: Sequence[Handle]) -> None:
        """Checks targets and handles. Raises TargetGone if the pid of a target now belongs to another process, or if
        the undo of a handle is not on disk."""

    def release(self) -> None:
        """Lets the rank that is held for the fault continue now, before `apply` returns."""

    def wait_for_exit(self, timeout_s: float) -> Sequence[int]:
        """Waits at most `timeout_s` seconds until the target processes have ended. Returns the pids that are still
        alive."""


Emit = Callable[[Kind, Mapping[str, Any]], Event]


class Probe(Protocol):
    """Observes the job from outside, and changes nothing: it only emits events. `sample` is called every `period_s`
    seconds."""

    period_s: float

    def sample(self, emit: Emit) -> None: ...


@dataclass(frozen=True)
class Watched:
    """The folders that the probes of conditions may read. `mark`: the mark that every command of such a probe must have
    in its environment. `ended`: set when the run ends."""

    run_dir: Path
    checkpoints: Path | None
    mark: str
    ended: threading.Event = field(default_factory=threading.Event)


class CheckpointFormat(Protocol):
    """How checkpoints of one format are recognised and read. Inherit from `Format` in checkpoints/formats/format.py: it
    has a default for everything but the name."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def is_folder(self, files: Any, folder: str, names: Sequence[str]) -> bool: ...

    def read_file(self, files: Any, path: str, size: int, into: Any, prefix: str = "") -> None: ...

    def read_folder(self, files: Any, folder: str, into: Any, prefix: str = "") -> None: ...
