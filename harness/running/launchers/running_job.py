"""A running job, started by a launcher or attached to."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torchaos.harness.contracts import ChaosError, LiveNode, RankProcess
from torchaos.harness.mechanics.proxy.server import Endpoint
from torchaos.harness.mechanics.site import Victim
from torchaos.harness.watching.probes.ranks import RankWatch


class RunningJob(ABC):
    """The common interface of `Job` and `Attached`."""

    def __init__(self, watch: RankWatch) -> None:
        self._watch = watch
        self._exit_code: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._live, name="job", daemon=True)

    @abstractmethod
    def start(self) -> None:
        """Starts the job. Raises UsageError if the command can't be started."""

    @property
    def done(self) -> bool:
        """Whether the last submission has ended. Some of its processes may still be alive until `stop`."""
        return self._done.is_set()

    @property
    def trouble(self) -> str:
        """Why the run can't go on, as a clause; empty if nothing is wrong."""
        return ""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code of the last submission (negative: the number of a signal). None while it runs, or if only the
        job's parent process can know it."""
        return self._exit_code if self._done.wait(timeout_s) else None

    def ranks(self) -> dict[int, RankProcess]:
        """The live ranks, by number. A rank that is ambiguous, or not up yet, is left out."""
        return self._watch.ranks()

    def agents(self, nodes: Sequence[int] = ()) -> list[Victim]:
        """Torchelastic's agents of these nodes; of all nodes if none is named. Raises ChaosError if a node has none
        now."""
        found = self._watch.agents()
        missing = [node for node in nodes if node not in found]
        if missing or not found:
            raise ChaosError(f"node {missing[0] if missing else 0} has no torchelastic agent now")
        return [Victim(*found[node], rank=None) for node in nodes or sorted(found)]

    def nodes(self) -> Sequence[LiveNode]:
        """The nodes, in order of their index."""
        return []

    def endpoints(self) -> Mapping[str, Endpoint]:
        """The endpoints that have a proxy, by name."""
        return {}

    @abstractmethod
    def members(self) -> dict[int, int]:
        """Every living process of the job: start times (clock ticks since boot) by pid."""

    @abstractmethod
    def stop(self, grace_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[int]:
        """Ends every process of the job. Returns the pids that could not be ended."""

    @abstractmethod
    def _live(self) -> None:
        """Follows the job to its end. Runs in its own thread."""
