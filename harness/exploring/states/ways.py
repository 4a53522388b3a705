"""Sorts the operations of a recording into *ways*: sequences whose order never changes. Each rank has a way. A folder
or a file that several ranks use is made by the rank that comes first, which is chance: another rank could have made it.
So the operations by which a rank makes such things are a way of their own. This changes no order: an operation still
comes after what its rank did before, and before what its rank did later. But the ranks that use the folder then differ
in nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchaos.harness.exploring.operations import Kind, Recording
from torchaos.harness.exploring.states.world import Effect, World

Name = int | str | None  # a rank, None: processes of no rank; a string: what a rank makes that others use
_MOVES = (Kind.RENAME, Kind.UNLINK, Kind.RMDIR)
Counts = Mapping[Name, int]  # by way: how many of its operations


@dataclass
class Way:
    """A sequence of operations. `needs`: how many operations of other ways come before an operation, by its number;
    only if they are more than before the operation of this way that precedes it."""

    name: Name
    by: int | None  # the rank that did the operations
    effects: list[Effect] = field(default_factory=list)
    done: list[int] = field(default_factory=lambda: [0])  # by the number of done operations of this way: of the rank
    needs: dict[int, Counts] = field(default_factory=dict)


def ways(recording: Recording, world: World) -> tuple[Way, ...]:
    """The ways, those of ranks first. Needs are complete: an operation also needs what its needs need."""
    sources: dict[int, set[int]] = {effect.operation.number: set(effect.needs) for effect in world.effects}
    for a, b in recording.before:
        if b in sources:
            sources[b].add(a)
    shared = _shared(world)
    found: dict[Name, Way] = {rank: Way(rank, rank) for rank in recording.lines}
    pasts: dict[int, dict[Name, int]] = {}  # by operation: what comes before its end
    last: dict[int | None, int] = {}  # the last operation of each rank
    for effect in world.effects:
        number, rank = effect.operation.number, effect.operation.rank
        past: dict[Name, int] = {}
        for source in (*sources[number], *([last[rank]] if rank in last else ())):
            for name, count in pasts.get(source, {}).items():
                past[name] = max(past.get(name, 0), count)
        way = found[rank]
        if number in shared:
            way = found.setdefault(f"shared, by {rank}", Way(f"shared, by {rank}", rank))
        before = pasts[way.effects[-1].operation.number] if way.effects else {}
        needs = {name: count for name, count in past.items() if name != way.name}
        if any(count > before.get(name, 0) for name, count in needs.items()):
            way.needs[number] = needs
        way.effects.append(effect)
        way.done.append(world.index[number] + 1)
        pasts[number], last[rank] = {**past, way.name: len(way.effects)}, number
    return tuple(found.values())


def _shared(world: World) -> set[int]:
    """The operations that make a file or folder that another rank uses, other than to rename or remove it."""
    makers = {
        effect.operation.number: effect.operation.rank
        for effect in world.effects
        if effect.entries and effect.operation.kind in (Kind.MKDIR, Kind.CREATE)
    }
    return {
        need
        for effect in world.effects
        if effect.operation.kind not in _MOVES
        for need in effect.needs
        if need in makers and makers[need] != effect.operation.rank
    }
