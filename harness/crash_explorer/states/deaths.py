"""The states that a death of the whole job leaves while its machines live, and those that the death of one node
leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording
from torchaos.harness.crash_explorer.states.crash_points import Cuts
from torchaos.harness.crash_explorer.states.fs_model import Cut, World
from torchaos.harness.crash_explorer.states.state import State, joined

# The whole job dies at once, and its machines live: everything that was written is there. Each rank's operations may
# stop at any place that the operations of the other ranks allow. Syncs do not matter, because the page cache of the
# kernel outlives the processes. (kill(2), signal(7); a write(2) whose process is killed may be done in part, in whole
# pages.)

PROCESS_DEATH = "process death"


def process_death_states(recording: Recording, symmetry: bool = True, seed: int = 0) -> Iterator[State]:
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
            f"process-death-{tree.digest[:12]}",
            PROCESS_DEATH,
            max(steps, default=None),
            tree,
            done[-1] if done else None,
            len(done),
            recording.blobs,
            recording.kept_as_made,
            tuple(moment.seen),
            done=cut,
        )
        known = found.setdefault(tree.digest, state)
        if known is not state:  # equal files again, for example after a file was made and removed
            found[tree.digest] = replace(known, moments=joined([*known.moments, *state.moments]))
    yield from found.values()


# One node dies, and the ranks of the other nodes continue until they notice: at the next collective with a dead rank,
# or when the launcher ends them. The survivors' operations are those of the recorded run, as far as these need nothing
# from the dead node. It is not known what survivors would do about an error. With `local`, each node keeps its
# checkpoints on a disk of its own, and the dead node's checkpoints are gone.

NODE_DEATH = "node death"
NOTICED_S = 30.0  # seconds; torchelastic ends its workers at most this long after a node is lost


def node_death_states(
    recording: Recording, nodes: Mapping[int, int], noticed_s: float = NOTICED_S, local: bool = False
) -> Iterator[State]:
    """The states that the death of one node can leave. `nodes`: the node of each rank. `noticed_s`: the most seconds of
    the recorded run for which the other ranks continue."""
    world = World(recording)
    found: dict[str, State] = {}
    for node in sorted(set(nodes.values())):
        dead = {rank for rank, its in nodes.items() if its == node}
        tried: set[tuple[int, ...]] = set()
        for cut, times in _cuts(recording, world, dead, noticed_s):
            if not times and tuple(cut.values()) in tried:
                continue
            tried.add(tuple(cut.values()))
            effects = [effect for effect in world.effects if world.has(cut, effect.operation)]
            lost = [effect for effect in effects if local and effect.operation.rank in dead]
            tree = world.tree_of([effect for effect in effects if effect not in lost]) if lost else world.tree(cut)
            steps = [effect.operation.step for effect in effects if effect.operation.step is not None]
            state = State(
                f"node-death-{tree.digest[:12]}", NODE_DEATH, max(steps, default=None), tree,
                effects[-1].operation if effects else None, len(effects), recording.blobs, recording.kept_as_made,
                times, tuple(effect.operation for effect in lost), cut,
            )  # fmt: skip
            known = found.setdefault(tree.digest, state)
            if known is not state:
                found[tree.digest] = replace(known, moments=joined([*known.moments, *state.moments]))
    yield from found.values()


def _cuts(
    recording: Recording, world: World, dead: set[int], noticed_s: float
) -> Iterator[tuple[Cut, tuple[tuple[float, float], ...]]]:
    """Yields how many operations each rank has done when the job is over, and (begin, end) of the times at which that
    happened in the recorded run. The node dies after any operation, and the job is over after any operation that
    survivors may still do. Of the moments between three writes to one file, only the first is used."""
    operations = recording.operations
    needs = {effect.operation.number: set(effect.needs) for effect in world.effects}
    for a, b in recording.before:
        needs[b].add(a)
    threes = (line[at : at + 3] for line in recording.lines.values() for at in range(len(line) - 2))
    alike = {three[1].number for three in threes if _are_one(three)}
    done: dict[int | None, int] = dict.fromkeys(recording.lines, 0)
    since = recording.began_s
    for at in range(len(operations) + 1):
        if at:
            done[operations[at - 1].rank] += 1
        if at and operations[at - 1].number in alike:
            continue
        until = operations[at].ended_s if at < len(operations) else recording.ended_s
        yield dict(done), ((since, max(since, until)),)
        cut, blocked = dict(done), set[int | None](dead)
        for operation in operations[at:]:
            if operation.rank in blocked:
                continue
            missing = (need for need in needs[operation.number] if not world.has(cut, operations[need]))
            if operation.ended_s > since + noticed_s or next(missing, None) is not None:
                blocked.add(operation.rank)
                continue
            cut[operation.rank] += 1
            if operation.number not in alike:
                yield dict(cut), ()
        since = max(since, until)


def _are_one(own: Sequence[Operation]) -> bool:
    """Whether these are all writes to the same file."""
    return all(each.kind is OperationKind.WRITE and each.file == own[0].file for each in own)
