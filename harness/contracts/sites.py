"""The place at which a fault is applied."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Protocol, Sequence

from torchaos.harness.agent.wire import Event, Kind, Phase

if TYPE_CHECKING:
    from torchaos.harness.contracts.faults import Handle
    from torchaos.harness.contracts.jobs import LiveNode
    from torchaos.harness.mechanics.proxy.server import Endpoint


class Site(Protocol):
    """The place at which a fault is applied, as every fault sees it. It is a `RankSite` (agent/site.py) in a rank,
    where the process is the target itself, and a `NodeSite` outside."""

    @property
    def fault(self) -> str:
        """The fault's id."""

    @property
    def pids(self) -> Sequence[int]:
        """The target processes."""

    @property
    def step(self) -> int | None:
        """The global step at the Moment, if it is known."""

    @property
    def phase(self) -> Phase | None: ...

    def signal(self, number: int) -> None:
        """Send a signal to each target process, by pidfd if it is another process."""

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
    def endpoints(self) -> Mapping[str, Endpoint]:
        """The job's endpoints that have a proxy, by name, for a fault that hits endpoints."""

    @property
    def checkpoints(self) -> Path | None:
        """The folder of the job's checkpoints, as the scenario gives it. Outside the run's own folder, a fault may
        touch only the files in it."""

    @property
    def guarded(self) -> Sequence[Handle]:
        """The handles that `changes` returned and that are on disk. Empty before `apply` runs."""

    @property
    def undo_copies(self) -> Path:
        """The folder in which `File.of` saves copies to restore."""

    def check(self, changes: Sequence[Handle]) -> None:
        """Checks targets and handles. Raises TargetGone if the pid of a target now belongs to another process, or if
        one of these handles is not guarded."""

    def release(self) -> None:
        """Lets the rank that is held at the Moment continue now, before `apply` returns."""

    def wait_for_exit(self, timeout_s: float) -> Sequence[int]:
        """Waits at most `timeout_s` seconds until the target processes have ended. Returns the pids that are still
        alive."""
