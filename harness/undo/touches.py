"""The things that a handle may change, as the handle declares them. Whether a fault is permitted is decided by this
declaration alone."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.harness.machine.netspace import Space


@dataclass(frozen=True)
class Touches:
    """What a handle may change. At least one field is set; the constructor raises ValueError otherwise."""

    process: tuple[int, int] | None = None  # pid and start time (clock ticks since boot) of a process of the job
    run_id: str | None = None  # everything that carries the id of this run
    network: Space | None = None  # a network namespace; the host's only with consent
    path: str | None = None  # a path in the run directory or among the job's checkpoints
    own: str | None = None  # a path that must be in the run directory
    marked: str | None = None  # a name that only torchaos uses; the handle's constructor checks it

    def __post_init__(self) -> None:
        if not any((self.process, self.run_id, self.network, self.path, self.own, self.marked)):
            raise ValueError("a handle that does not say what it touches can't be permitted")
