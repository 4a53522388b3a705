"""checkpoint.tracker and .permissions: the checkpoint itself is whole, but the file that names it is wrong, or a file
can't be read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchaos.plugin import Count
from torchaos.plugin.families.checkpoints import Checkpoint, CheckpointFault, Edit, Mode, shard, tracker


@dataclass(frozen=True)
class Tracker(CheckpointFault):
    """Spoils the file that names the newest checkpoint (`latest`, `latest_checkpointed_iteration.txt`). `how`: the file
    becomes empty, or names an older checkpoint."""

    how: Literal["empty", "stale"] = "empty"
    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.tracker"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [tracker(checkpoint, others, self.how)]


@dataclass(frozen=True)
class Permissions(CheckpointFault):
    """Removes every user's permission to read one file of tensors. Root can still read it, so a job that runs as root
    does not feel the fault."""

    newest: Count = 1
    seed: int | None = None

    name = "checkpoint.permissions"

    def edits(self, checkpoint: Checkpoint, others: Sequence[Checkpoint], draw: random.Random) -> Sequence[Edit]:
        return [Mode(shard(checkpoint, draw), 0)]
