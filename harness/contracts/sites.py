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
    """The place at which a fault is applied: a `RankSite` (agent/site.py) inside a rank, or a `NodeSite` outside. In a
    rank, the target process is the rank itself."""

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
    def endpoints(self) -> Mapping[str, Endpoint]:
        """The job's endpoints that have a proxy, by name. Empty if the fault hits no endpoint."""

    @property
    def checkpoints(self) -> Path | None:
        """The folder of the job's checkpoints, as the scenario gives it. Outside the run's own folder, a fault may
        touch only the files in it."""

    @property
    def guarded(self) -> Sequence[Handle]:
        """The handles from `changes` that are on disk. Empty before `apply` runs."""

    @property
    def undo_copies(self) -> Path:
        """The folder for copies of files that a fault changes; `File.of` saves them there."""

    def check(self, changes: Sequence[Handle]) -> None:
        """Checks targets and handles. Raises TargetGone if the pid of a target now belongs to another process, or if
        the undo of a handle is not on disk."""

    def release(self) -> None:
        """Lets the rank that is held for the fault continue now, and not only when `apply` returns."""

    def wait_for_exit(self, timeout_s: float) -> Sequence[int]:
        """Waits at most `timeout_s` seconds until the target processes have ended. Returns the pids that are still
        alive."""
