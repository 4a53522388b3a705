"""Chooses the states to try, from the wanted models of death.

**Process death.** The whole job dies at once, and its machines live: everything that was written is there. Each rank's
operations may stop at any place that the operations of the other ranks allow. Syncs do not matter, because the page
cache of the kernel outlives the processes. (kill(2), signal(7); a write(2) whose process is killed may be done in part,
in whole pages.)

**Node death.** One node dies, and the ranks of the other nodes continue until they notice: at the next collective with
a dead rank, or when the launcher ends them. The survivors do what they did in the recorded run, as far as this needs
nothing from the dead node. What they would do about an error is not known. With `local`, each node keeps its
checkpoints on a disk of its own, and the dead node's checkpoints are gone.

**Power loss.** All machines lose their power at once: see power_loss.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from torchaos.harness.crash_explorer import power_loss
from torchaos.harness.crash_explorer.crash_points import CrashPoints
from torchaos.harness.crash_explorer.fs_model import Cut, FilesystemModel, State, StateSet, choose
from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording
from torchaos.harness.crash_explorer.power_loss import Persistence
from torchaos.harness.crash_explorer.s3_store import is_stored
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import Plan, PlannedJob

PROCESS_DEATH = "process death"


def process_death_states(points: CrashPoints) -> Iterator[State]:
    """The states that the death of all processes can leave at the moments of `points`."""
    found = StateSet(points.recording, PROCESS_DEATH, "process-death")
    for moment in points.classes:
        cut, _halves = points.cut(moment.positions)
        found.add(points.tree(moment), points.done(moment), moment.seen, done=cut)
    yield from found


NODE_DEATH = "node death"
NOTICED_S = 30.0  # seconds; torchelastic ends its workers at most this long after a node is lost


def node_death_states(
    recording: Recording, nodes: Mapping[int, int], noticed_s: float = NOTICED_S, local: bool = False
) -> Iterator[State]:
    """The states that the death of one node can leave. `nodes`: the node of each rank. `noticed_s`: the most seconds of
    the recorded run for which the other ranks continue. `local`: whether each node has a disk of its own for
    checkpoints."""
    fs = FilesystemModel(recording)
    found = StateSet(recording, NODE_DEATH, "node-death")
    for node in sorted(set(nodes.values())):
        dead = {rank for rank, its in nodes.items() if its == node}
        tried: set[tuple[int, ...]] = set()
        for cut, times in _cuts(recording, fs, dead, noticed_s):
            if not times and tuple(cut.values()) in tried:
                continue
            tried.add(tuple(cut.values()))
            effects = [effect for effect in fs.effects if fs.has(cut, effect.operation)]
            lost = [effect for effect in effects if local and effect.operation.rank in dead]
            tree = fs.tree_of([effect for effect in effects if effect not in lost]) if lost else fs.tree(cut)
            done = [effect.operation for effect in effects]
            found.add(tree, done, times, tuple(effect.operation for effect in lost), cut)
    yield from found


def _cuts(
    recording: Recording, fs: FilesystemModel, dead: set[int], noticed_s: float
) -> Iterator[tuple[Cut, tuple[tuple[float, float], ...]]]:
    """Yields, for each possible end of the job, how many operations each rank has done, and (begin, end) of the times
    at which the recorded run was in that state; no times if it never was. The node may die after any operation, and the
    survivors may stop after any operation that they can still do. Of the moments between writes to one file, only the
    first is used."""
    operations = recording.operations
    needs = {effect.operation.number: set(effect.needs) for effect in fs.effects}
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
            missing = (need for need in needs[operation.number] if not fs.has(cut, operations[need]))
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


Nodes = Mapping[int, int]  # the node of each rank
Moments = Callable[[], CrashPoints]  # finds all moments of a recording, once


def _power_loss(_recording: Recording, _nodes: Nodes, points: Moments, persistence: Persistence) -> Iterator[State]:
    return power_loss.states(points(), persistence)


_OF_POWER = {f"power-loss-{promise.value}": partial(_power_loss, persistence=promise) for promise in Persistence}
# By the name on the command line.
MODELS: Mapping[str, Callable[[Recording, Nodes, Moments], Iterator[State]]] = {
    "process-death": lambda _recording, _nodes, points: process_death_states(points()),
    "node-death": lambda recording, nodes, _cuts: node_death_states(recording, nodes),
    "node-death-local": lambda recording, nodes, _cuts: node_death_states(recording, nodes, local=True),
    **_OF_POWER,
}
_OF_NODES = ("node-death", "node-death-local")


def models_of(wanted: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """The models of death by name. `all`: all models that fit the job. Raises UsageError for a model that does not
    fit."""
    if plan.job.nodes == 1 and (of_nodes := [model for model in wanted if model in _OF_NODES]):
        raise UsageError(f"{plan.scenario}: the job has one node, so {of_nodes[0]} is process-death")
    if is_stored(plan):
        if other := [model for model in wanted if model not in ("process-death", "all")]:
            raise UsageError(f"{plan.scenario}: a store keeps what it has acknowledged, so {other[0]} is process-death")
        return ("process-death",)
    if "all" not in wanted:
        return tuple(wanted)
    none = _OF_NODES if plan.job.nodes == 1 else _OF_NODES[1:]  # it is not known where checkpoints are
    return tuple(model for model in MODELS if model in wanted or model not in none)


def nodes_of(job: PlannedJob) -> Nodes:
    return {rank: rank // job.per_node for rank in range(job.world_size)}


def state_named(recording: Recording, nodes: Nodes, name: str) -> State:
    """The state of this name, from whatever model of death. Raises UsageError if there is none."""
    points = cache(partial(CrashPoints, recording))
    for model in MODELS:
        if found := next((state for state in MODELS[model](recording, nodes, points) if state.name == name), None):
            return found
    raise UsageError(f"{name}: the recorded run has no state of this name; report.html lists those that were tried")


@dataclass(frozen=True)
class Choice:
    """The states to try. States with equal files are tried once in each model of death: the same files may mean that a
    loss of power has lost a finished save, or that all processes died before the save began."""

    states: tuple[State, ...]
    there_are: int  # the number of states with different files
    in_words: str

    @property
    def in_all(self) -> int:
        """The number of states: equal files count once for each model."""
        return max(self.there_are, len(self.states))


def chosen(recording: Recording, models: Sequence[str], nodes: Nodes, most: int | None, seed: int) -> Choice:
    """At most `most` states with different contents of the folder. The seed reproduces the choice."""
    points = cache(partial(CrashPoints, recording))
    found = choose((state for model in models for state in MODELS[model](recording, nodes, points)), most, seed)
    states = [state for group in found.equal for state in {each.model: each for each in reversed(group)}.values()]
    words, of_power = found.in_words, not _OF_POWER.keys().isdisjoint(models)
    if not set(models) <= set(_OF_NODES) and (points().drawn or (of_power and not power_loss.examines_all(points()))):
        operations = len(recording.operations)
        words += f". There may be more: the run made {operations} operations, and not every moment was examined"
    elif of_power:
        words += ". If a loss of power can lose many changes at once, not every combination of them is examined"
    return Choice(tuple(states), found.there_are, words)
