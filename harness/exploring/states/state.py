"""A content of the checkpoint folder that a death can leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchaos.harness.exploring.blobs import Blobs
from torchaos.harness.exploring.operations import Operation
from torchaos.harness.exploring.tree import Tree


@dataclass(frozen=True)
class State:
    """Deaths of the job that all leave the same files."""

    name: str  # the same in each exploration of one recording
    model: str  # of death: `process death`, `node death`, or `power loss` and its persistence model
    died_at_step: int | None  # the newest step that a rank was in at its last operation; None: unknown
    tree: Tree
    last_operation: Operation | None  # the last one that the files have felt, in the recorded order; None: none
    operations: int  # how many came before the death: the fewer, the simpler the state
    blobs: Blobs = field(compare=False, repr=False)
    linked: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # see Blobs.make_tree
    moments: tuple[tuple[float, float], ...] = ()  # from and until when in the recorded run a death could leave it,
    # in seconds of CLOCK_MONOTONIC; none: only in a run in which the ranks are ahead of each other in another way
    lost: tuple[Operation, ...] = ()  # by a loss of power: what came before the death, and is not (or not whole) there
    done: Mapping[int | None, int] | None = None  # how many operations each rank had done; None: all up to the last

    @property
    def digest(self) -> str:
        """Equal for equal files."""
        return self.tree.digest

    def write_to(self, folder: Path) -> None:
        """Makes the files in `folder`, which must be empty or missing. Raises OSError."""
        self.blobs.make_tree(self.tree, folder, self.linked)


def joined(times: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The times in order. Times that touch or overlap are joined."""
    found: list[tuple[float, float]] = []
    for since, until in sorted(times):
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], until))
        else:
            found.append((since, until))
    return tuple(found)
