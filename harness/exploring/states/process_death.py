"""The whole job dies at once, and its machines live: everything that was written is there. Each rank's operations may
stop at any place that the operations of the other ranks allow. Syncs do not matter, because the page cache of the
kernel outlives the processes. (kill(2), signal(7); a write(2) whose process is killed may be done in part, in whole
pages.)"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torchaos.harness.exploring.operations import Recording
from torchaos.harness.exploring.states.cuts import Cuts
from torchaos.harness.exploring.states.state import State, joined

MODEL = "process death"


def states(recording: Recording, symmetry: bool = True, seed: int = 0) -> Iterator[State]:
    """The states that the death of all processes can leave. `symmetry`: ranks that do the same operations count as
    equal. `seed`: used to choose, if there are too many moments to examine."""
    return of_cuts(Cuts(recording, symmetry, seed))


def of_cuts(cuts: Cuts) -> Iterator[State]:
    """The states that the death of all processes can leave at the moments of `cuts`."""
    recording, found = cuts.recording, dict[str, State]()
    for moment in cuts.classes:
        cut, halves = cuts.cut(moment.stands)
        done = [op for op in recording.operations if cuts.world.has(cut, op) or op.number in halves]
        steps = [operation.step for operation in done if operation.step is not None]
        tree = cuts.tree(moment)
        state = State(
            f"process-death-{tree.digest[:12]}", MODEL, max(steps, default=None), tree, done[-1] if done else None,
            len(done), recording.blobs, recording.kept_as_made, tuple(moment.seen), done=cut,
        )  # fmt: skip
        known = found.setdefault(tree.digest, state)
        if known is not state:  # equal files again, for example after a file was made and removed
            found[tree.digest] = replace(known, moments=joined([*known.moments, *state.moments]))
    yield from found.values()
