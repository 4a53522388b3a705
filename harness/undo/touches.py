"""What a handle says that it may touch: the one declaration by which it is permitted, or refused."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.harness.machine.netspace import Space


@dataclass(frozen=True)
class Touches:
    """At least one of these."""

    process: tuple[int, int] | None = None  # pid and start time: one of the job's
    run_id: str | None = None  # what bears the id of this run
    network: Space | None = None  # not the host's, without consent
    path: str | None = None  # in the run directory, or among the job's checkpoints
    own: str | None = None  # in the run directory alone
    marked: str | None = None  # bears a name that only torchaos gives; the handle checks that when it is made

    def __post_init__(self) -> None:
        if not any((self.process, self.run_id, self.network, self.path, self.own, self.marked)):
            raise ValueError("a handle that does not say what it touches can't be permitted")
