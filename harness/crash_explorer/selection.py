"""Chooses the states to try, from the wanted models of death."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from torchaos.harness.crash_explorer.operations import Recording
from torchaos.harness.crash_explorer.states import deaths, power_loss
from torchaos.harness.crash_explorer.states.crash_points import Cuts
from torchaos.harness.crash_explorer.states.power_loss import Persistence
from torchaos.harness.crash_explorer.states.state import State, choose
from torchaos.harness.crash_explorer.store.s3_store import is_stored
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import Plan, PlannedJob

Nodes = Mapping[int, int]  # the node of each rank
Moments = Callable[[], Cuts]  # finds all moments of a recording, once


def _process_death(_recording: Recording, _nodes: Nodes, cuts: Moments) -> Iterator[State]:
    return deaths.of_cuts(cuts())


def _node_death(recording: Recording, nodes: Nodes, _cuts: Moments, local: bool = False) -> Iterator[State]:
    return deaths.node_death_states(recording, nodes, local=local)


def _power_loss(_recording: Recording, _nodes: Nodes, cuts: Moments, persistence: Persistence) -> Iterator[State]:
    return power_loss.of_cuts(cuts(), persistence)


_OF_POWER = {f"power-loss-{promise.value}": partial(_power_loss, persistence=promise) for promise in Persistence}
# By the name on the command line.
MODELS: Mapping[str, Callable[[Recording, Nodes, Moments], Iterator[State]]] = {
    "process-death": _process_death,
    "node-death": _node_death,
    "node-death-local": partial(_node_death, local=True),
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
    """The state of this name, of any model. Raises UsageError if there is none."""
    cuts = cache(partial(Cuts, recording))
    for model in MODELS:
        if found := next((state for state in MODELS[model](recording, nodes, cuts) if state.name == name), None):
            return found
    raise UsageError(f"{name}: the recorded run has no state of this name; report.html lists those that were tried")


@dataclass(frozen=True)
class Choice:
    """The states to try. States with equal files are tried once in each model, because a loss of power may have lost a
    save that had not begun when all processes died."""

    states: tuple[State, ...]
    there_are: int  # the number of states with different files
    in_words: str

    @property
    def in_all(self) -> int:
        """The number of states: equal files count once for each model."""
        return max(self.there_are, len(self.states))


def chosen(recording: Recording, models: Sequence[str], nodes: Nodes, most: int | None, seed: int) -> Choice:
    """At most `most` states with different contents of the folder. The seed reproduces the choice."""
    cuts = cache(partial(Cuts, recording))
    found = choose((state for model in models for state in MODELS[model](recording, nodes, cuts)), most, seed)
    states = [state for group in found.equal for state in {each.model: each for each in reversed(group)}.values()]
    words, of_power = found.in_words, not _OF_POWER.keys().isdisjoint(models)
    if not set(models) <= set(_OF_NODES) and (cuts().drawn or (of_power and not power_loss.examines_all(cuts()))):
        operations = len(recording.operations)
        words += f". There may be more: the run made {operations} operations, and not every moment was examined"
    elif of_power:
        words += ". If a loss of power can lose many changes at once, not every combination of them is examined"
    return Choice(tuple(states), found.there_are, words)
