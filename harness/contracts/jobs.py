"""A job: how it is started, and its nodes and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Protocol, Sequence

if TYPE_CHECKING:
    from torchaos.harness.contracts.faults import Handle
    from torchaos.harness.mechanics.network.link import Link


@dataclass(frozen=True)
class JobSpec:
    """Everything that a launcher needs to start the job once. Paths are absolute; placeholders are filled in."""

    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]  # complete
    log: Path  # where stdout and stderr go
    submission: int  # from 0: how often the job has been submitted before
    nodes: int = 1  # for a launcher that makes its nodes
    own_env: Mapping[str, str] = field(default_factory=dict)  # the part of `env` that differs from this machine's
    checkpoints: Path | None = None  # the folder of the job's checkpoints
    container: Mapping[str, Any] = field(default_factory=dict)  # if nodes are containers: settings, see the grammar
    replicas: int = 1  # how many commands run at the same time, each with its own torchrun
    replica_ranks: int = 0  # ranks of each replica, if there are several replicas
    busy_nodes: int = 0  # how many nodes start at once; the others start when all ranks are up; 0: all at once
    hosts: tuple[str, ...] = ()  # the names of the machines that are the nodes, if the scenario gives them
    timeout_s: float = 0.0  # the job is ended after this time


@dataclass(frozen=True)
class RankProcess:
    """One live rank. (pid, start_ticks) identifies the process for ever."""

    rank: int
    local_rank: int
    node: int
    pid: int
    start_ticks: int
    attempt: int
    world_size: int
    gpu: int | None = None  # NVML's index of its GPU, as far as its environment shows
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
        """Variables that this node adds to the job's environment. A variable that the user has set keeps the user's
        value."""

    @property
    def link(self) -> Link | None:
        """Its link to the other nodes. None if faults can't change the link."""

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command with the prefix that runs it on this node: none, nsenter, docker exec, srun."""

    def host_pid(self, pid: int) -> int | None:
        """The pid in the harness's namespace of a pid that the node reports."""


class LiveNode(Protocol):
    """A node of the running job, as a fault sees it."""

    @property
    def node(self) -> Node: ...

    @property
    def run_id(self) -> str:
        """The mark of the job's processes; the mark of a fault's helper begins with it."""

    def processes(self) -> Mapping[int, int]:
        """The job's processes on this node at this time: start times (clock ticks since boot) by pid."""

    def start_again(self) -> int:
        """Starts the job's command on this node once more, and returns its pid. Raises ChaosError if the job is over,
        or the command still runs."""

    def keep_place(self) -> None:
        """Announces that the node will come back. Until then the job has not ended, whatever happens to the other
        nodes."""


class Launcher(Protocol):
    """The part of a launcher that differs between platforms. The rest (ranks, attempts, logs, resubmission) is in
    running/launchers/job.py. Attributes with a value here are optional: the registry adds them to a class that lacks
    them."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()  # capabilities of the machine
    cannot: ClassVar[Mapping[str, str]] = {}  # by injector, or by what it hits: what to write instead
    replicas: ClassVar[bool] = False  # it can start the replicas of job.replicas, each with its own torchrun
    sets_rendezvous: ClassVar[bool] = False  # the environment of its nodes has the rendezvous address for torchrun
    on_nodes: ClassVar[bool] = False  # its nodes are other machines, each with an agent of ours; see `FarLauncher`

    @staticmethod
    def needs_of(command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
        """Capabilities that only this job needs. Raises UsageError if the launcher can't launch it."""
        return frozenset()

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        """The things that `create` will make, so that their undo is on disk before they are made."""

    def create(self, spec: JobSpec) -> Sequence[Node]: ...


class FarLauncher(Launcher, Protocol):
    """A launcher whose nodes are other machines. What it needs to do there is done by `torchaos exec`, which wraps the
    command on each node; `argv` of a node puts a small helper beside it."""

    def commands(self, spec: JobSpec, nodes: Sequence[Node], wrapper: Sequence[str]) -> Sequence[Sequence[str]]:
        """The commands that start the job, to be run here: they end with it, with an exit code other than 0 if a node's
        command failed. On each node they run `wrapper`, to which the launcher adds --node or --hosts, and then the
        command of the spec."""
