"""One node dies, and the ranks of the others go on until they notice: at the next collective with a dead rank, or when
the launcher ends them.

What the survivors do is what they did in the recorded run, as far as they need nothing from the dead node; what they
would do about an error is not known. With `local`, each node keeps its checkpoints on a disk of its own, and those of
the dead node are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torchaos.harness.exploring.operations import Operation, Recording
from torchaos.harness.exploring.states.state import State, joined
from torchaos.harness.exploring.states.world import World

MODEL = "node death"
NOTICED_S = 30.0  # torchelastic ends its workers in that time after a lost node, at the latest


@dataclass(frozen=True)
class _Left:
    """After these operations the job was over. They are those before the death, and the first of the survivors'."""

    done: frozenset[int]
    times: tuple[tuple[float, float], ...]


def states(
    recording: Recording, nodes: Mapping[int, int], noticed_s: float = NOTICED_S, local: bool = False
) -> Iterator[State]:
    """The states that the death of one node can leave. `nodes`: the node of each rank. `noticed_s`: the most seconds of
    the recorded run for which the other ranks continue."""
    world = World(recording)
    found: dict[str, State] = {}
    for node in sorted(set(nodes.values())):
        dead = {rank for rank, its in nodes.items() if its == node}
        for left in _left(recording, world, dead, noticed_s):
            effects = [effect for effect in world.effects if effect.operation.number in left.done]
            kept = [effect for effect in effects if not (local and effect.operation.rank in dead)]
            tree = world.tree_of(kept)
            steps = [effect.operation.step for effect in effects if effect.operation.step is not None]
            state = State(
                f"node-death-{tree.digest[:12]}", MODEL, max(steps, default=None), tree,
                effects[-1].operation if effects else None, len(effects), recording.blobs, recording.kept_as_made,
                left.times, tuple(effect.operation for effect in effects if effect not in kept),
            )  # fmt: skip
            known = found.setdefault(tree.digest, state)
            if known is not state:
                found[tree.digest] = replace(known, moments=joined([*known.moments, *state.moments]))
    yield from found.values()


def _left(recording: Recording, world: World, dead: set[int], noticed_s: float) -> Iterator[_Left]:
    """All sets of operations: the node dies after each operation of the recorded run, and the job is over after each
    that survivors may still do."""
    operations = recording.operations
    needs: dict[int, set[int]] = {effect.operation.number: set(effect.needs) for effect in world.effects}
    for a, b in recording.before:
        needs[b].add(a)
    tried: set[frozenset[int]] = set()
    since = recording.began_s
    for at in range(len(operations) + 1):
        until = operations[at].ended_s if at < len(operations) else recording.ended_s
        done = frozenset(range(at))
        yield _Left(done, ((since, max(since, until)),))
        for more in _going_on(operations[at:], needs, done, dead, since + noticed_s):
            if more not in tried:
                tried.add(more)
                yield _Left(more, ())
        since = max(since, until)


def _going_on(
    rest: tuple[Operation, ...], needs: Mapping[int, set[int]], done: frozenset[int], dead: set[int], until_s: float
) -> Iterator[frozenset[int]]:
    """What is done after each operation that the survivors may still do."""
    blocked: set[int | None] = set(dead)
    for operation in rest:
        if operation.rank in blocked:
            continue
        if operation.ended_s > until_s or not needs[operation.number] <= done:
            blocked.add(operation.rank)
            continue
        done |= {operation.number}
        yield done
