"""Chooses the states to try, from the wanted models of death."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torchaos.harness.contracts import UsageError
from torchaos.harness.exploring.operations import Recording
from torchaos.harness.exploring.states import node_death, power_loss, process_death
from torchaos.harness.exploring.states.choose import choose
from torchaos.harness.exploring.states.cuts import most_of
from torchaos.harness.exploring.states.persistence import Persistence
from torchaos.harness.exploring.states.state import State
from torchaos.harness.record.plan import Plan, PlannedJob

Nodes = Mapping[int, int]  # the node of each rank
LONG = 1000  # operations; of more, not every moment of a loss of power is examined


def _power_loss(recording: Recording, _nodes: Nodes, persistence: Persistence) -> Iterator[State]:
    return power_loss.states(recording, persistence)


# By the name on the command line.
MODELS: Mapping[str, Callable[[Recording, Nodes], Iterator[State]]] = {
    "process-death": lambda recording, _nodes: process_death.states(recording),
    "node-death": node_death.states,
    "node-death-local": partial(node_death.states, local=True),
    **{f"power-loss-{promise.value}": partial(_power_loss, persistence=promise) for promise in Persistence},
}
_OF_NODES = ("node-death", "node-death-local")


def models_of(wanted: Sequence[str], plan: Plan) -> tuple[str, ...]:
    """The models of death by name. `all`: all models that fit the job. Raises UsageError for a model that does not
    fit."""
    if plan.job.nodes == 1 and (of_nodes := [model for model in wanted if model in _OF_NODES]):
        raise UsageError(f"{plan.scenario}: the job has one node, so {of_nodes[0]} is process-death")
    if "all" not in wanted:
        return tuple(wanted)
    none = _OF_NODES if plan.job.nodes == 1 else _OF_NODES[1:]  # it is not known where checkpoints are
    return tuple(model for model in MODELS if model in wanted or model not in none)


def nodes_of(job: PlannedJob) -> Nodes:
    return {rank: rank // job.per_node for rank in range(job.world_size)}


def state_named(recording: Recording, nodes: Nodes, name: str) -> State:
    """The state of this name, of any model. Raises UsageError if there is none."""
    for model in MODELS:
        if found := next((state for state in MODELS[model](recording, nodes) if state.name == name), None):
            return found
    raise UsageError(f"{name}: the recorded run has no state of this name; report.html lists those that were tried")


@dataclass(frozen=True)
class Choice:
    """The states to try. States with equal files are tried once in each model, because a loss of power may have lost a
    save that had not begun when all processes died."""

    states: tuple[State, ...]
    there_are: int  # the number of states with different files
    in_words: str


def chosen(recording: Recording, models: Sequence[str], nodes: Nodes, most: int | None, seed: int) -> Choice:
    """At most `most` states with different contents of the folder. The seed reproduces the choice."""
    found = choose((state for model in models for state in MODELS[model](recording, nodes)), most, seed)
    states = [state for group in found.equal for state in {each.model: each for each in reversed(group)}.values()]
    words, operations = found.in_words, len(recording.operations)
    if operations > LONG or found.there_are >= most_of(recording) // 2:
        words += f". There may be more: the run made {operations} operations, and not every moment was examined"
    return Choice(tuple(states), found.there_are, words)
