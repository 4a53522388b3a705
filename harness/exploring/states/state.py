"""A content of the checkpoint folder that a death can leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchaos.harness.exploring.blobs import Blobs
from torchaos.harness.exploring.operations import Operation
from torchaos.harness.exploring.tree import Tree


@dataclass(frozen=True)
class State:
    """The contents of the folder that some deaths of the job leave, and these deaths."""

    name: str  # the same in each exploration of the same recording
    model: str  # of death: `process death`, `node death`, or `power loss` and its persistence model
    died_at_step: int | None  # the newest step that a rank was in at its last operation; None: unknown
    tree: Tree
    last_operation: Operation | None  # the last operation that changed the files, in the recorded order; None: none
    operations: int  # the number of operations before the death; a state with fewer is simpler
    blobs: Blobs = field(compare=False, repr=False)
    linked: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # see Blobs.make_tree
    moments: tuple[tuple[float, float], ...] = ()  # (begin, end) of deaths in the recorded run that leave this state,
    # seconds of CLOCK_MONOTONIC. Empty: only possible if the ranks' operations come in another order than recorded.
    lost: tuple[Operation, ...] = ()  # in a loss of power: operations whose changes are missing, wholly or in part
    done: Mapping[int | None, int] | None = None  # operations done by each rank; None: all up to the last
    damage: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)  # events of a fault that hit the files

    @property
    def digest(self) -> str:
        """A digest that is equal for states with equal files."""
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
