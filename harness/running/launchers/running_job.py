"""A job that runs: one that a launcher started, or one that torchaos attached to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torchaos.harness.contracts import LiveNode, RankProcess
from torchaos.harness.mechanics.proxy.server import Endpoint
from torchaos.harness.mechanics.site import Victim


class RunningJob(Protocol):
    """What `Job` and `Attached` have in common."""

    def start(self) -> None: ...

    @property
    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code; None if the job is not done, or if it is not known."""
        ...

    def ranks(self) -> dict[int, RankProcess]:
        """The live ranks, by number."""
        ...

    def agents(self, nodes: Sequence[int] = ()) -> list[Victim]:
        """The torchelastic agents of these nodes; of all if none is named."""
        ...

    def nodes(self) -> Sequence[LiveNode]:
        """In order of their index."""
        ...

    def endpoints(self) -> Mapping[str, Endpoint]:
        """The endpoints that a proxy stands before."""
        ...

    def members(self) -> dict[int, int]:
        """Every living process of the job: start times (clock ticks since boot) by pid."""
        ...

    def stop(self, grace_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> list[int]:
        """End every process of the job; the pids of those that could not be ended."""
        ...
