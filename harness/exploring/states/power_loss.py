"""All machines of the job lose their power at once: bytes that were not synced may be missing, torn, or present without
the bytes before them. What exactly may happen depends on the promise of the file system (persistence.py).

There are too many combinations of losses to build all of them. After each change of files, in the recorded order, these
are built: nothing is lost; everything unsure is lost; each unsure change is lost alone; each is kept alone. They
include every bug that needs two changes in the wrong order. If there are few combinations, all are built."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchaos.harness.exploring.operations import Kind, Operation, Recording
from torchaos.harness.exploring.states.cuts import Cuts, most_of
from torchaos.harness.exploring.states.persistence import Persistence, Unsure, unsure
from torchaos.harness.exploring.states.state import State, joined
from torchaos.harness.exploring.states.world import Effect, World, changed
from torchaos.harness.exploring.tree import Content, Tree

FEW = 64  # at most this many combinations are all built
UNSEEN = 100  # classes of moments
TREES = 20  # for each moment, about so many trees are built
RECENT = 8  # the number of latest changes that are lost one by one; earlier changes are only lost together
_PAGE, _SECTOR = 4096, 512  # bytes


@dataclass(frozen=True)
class Loss:
    """The content of a file after a loss of power, and its changes that are missing, wholly or in part."""

    content: Content
    lost: tuple[Operation, ...]


@dataclass
class _Found:
    """The first way that leads to a tree, and all moments at which the tree may be left."""

    tree: Tree
    effects: Sequence[Effect]
    lost: tuple[Operation, ...]
    moments: list[tuple[float, float]]


def states(recording: Recording, persistence: Persistence = Persistence.STRICT) -> Iterator[State]:
    """The states that a loss of power can leave, with this promise of the file system. Moments that need another order
    of the ranks than the recorded one are examined only without a loss, if they have more than `UNSEEN` classes."""
    return of_cuts(Cuts(recording), persistence)


def of_cuts(cuts: Cuts, persistence: Persistence) -> Iterator[State]:
    """The states that a loss of power can leave at the moments of `cuts`."""
    recording, world = cuts.recording, cuts.world
    found: dict[str, _Found] = {}
    for effects, times, losses in _moments(cuts):
        for tree, lost in left(world, effects, persistence):
            known = found.setdefault(tree.digest, _Found(tree, effects, lost, []))
            known.moments += times
            if not losses:
                break
    for digest, each in found.items():
        steps = [effect.operation.step for effect in each.effects if effect.operation.step is not None]
        yield State(
            f"power-loss-{persistence.value}-{digest[:12]}", f"power loss, {persistence.value}",
            max(steps, default=None), each.tree, each.effects[-1].operation if each.effects else None,
            len(each.effects), recording.blobs, recording.kept_as_made, joined(each.moments), each.lost,
        )  # fmt: skip


def examines_all(cuts: Cuts) -> bool:
    """Whether losses are examined at every moment of `cuts`, except between two writes to one file."""
    return _every(cuts) == 1 and len(cuts.classes) <= UNSEEN


def left(
    world: World, effects: Sequence[Effect], persistence: Persistence
) -> Iterator[tuple[Tree, tuple[Operation, ...]]]:
    """Yields the trees that can be left after these effects, and the operations that each has lost. The first tree has
    lost nothing."""
    may = unsure(persistence, effects)
    done = _changes(effects)
    names = [effect for effect in effects if effect.entries]
    for lost in _names_lost(may):
        gone = frozenset(effect.operation.number for effect in lost)
        kept = [effect for effect in names if effect.operation.number not in gone]
        options = {node: _left_of(world, node, done[node], may, gone, persistence) for node in may.data}
        for chosen in _combinations(options, FEW // 4 if lost else FEW, 0 < len(lost) < len(may.names)):
            contents = {node: loss.content for node, loss in chosen.items()}
            tree = world.made(kept, lambda node: contents.get(node) or world.content_after(node, done.get(node, [])))  # noqa: B023
            missing = [effect.operation for effect in lost] + [op for loss in chosen.values() for op in loss.lost]
            yield tree, tuple(sorted(set(missing), key=lambda operation: operation.number))


def _moments(cuts: Cuts) -> Iterator[tuple[Sequence[Effect], list[tuple[float, float]], bool]]:
    """Yields the effects before each moment, (begin, end) of its times, and whether to examine losses. Between two
    writes to one file, losses are not examined."""
    operations, since = cuts.recording.operations, cuts.recording.began_s
    every = _every(cuts)
    for done in range(len(operations) + 1):
        following = operations[done] if done < len(operations) else None
        until = cuts.recording.ended_s if following is None else max(since, following.ended_s)
        last = operations[done - 1] if done else None
        between = last and following and last.kind is following.kind is Kind.WRITE and last.file == following.file
        if not between and (done % every == 0 or following is None):
            yield cuts.world.effects[:done], [(since, until)], True
            since = until
    for moment in cuts.classes:
        if moment.at is None:
            cut, _halves = cuts.cut(moment.stands)
            effects = [effect for effect in cuts.world.effects if cuts.world.has(cut, effect.operation)]
            yield effects, [], len(cuts.classes) <= UNSEEN


def _every(cuts: Cuts) -> int:
    """Losses are examined after each `_every` operations: more than 1 if there are too many moments."""
    return 1 + TREES * len(cuts.recording.operations) // most_of(cuts.recording)


def _changes(effects: Sequence[Effect]) -> dict[int, list[Effect]]:
    found: dict[int, list[Effect]] = {}
    for effect in effects:
        if effect.data and effect.node is not None:
            found.setdefault(effect.node, []).append(effect)
    return found


def _names_lost(may: Unsure) -> list[tuple[Effect, ...]]:
    """The sets of changes of names that may be missing: none, all, each alone, all but each. In a journal: all from
    some change on."""
    names = may.names
    recent = names[-RECENT:]
    if may.in_order:
        found = [names[len(names) - count :] for count in range(len(recent) + 1)]
    elif 2 ** len(names) <= FEW:
        found = [subset for count in range(len(names) + 1) for subset in itertools.combinations(names, count)]
    else:
        found = [(), *((each,) for each in recent)]
        found += [tuple(other for other in names if other is not each) for each in recent]
    return list(dict.fromkeys([*found, names]))


def _combinations(options: dict[int, list[Loss]], few: int, only_ends: bool) -> Iterator[dict[int, Loss]]:
    """Yields the combinations of files that have lost something. At most `few` combinations: all of them. Otherwise:
    none, all, and (unless `only_ends`) each file alone in each way, and all but each."""
    if math.prod(len(losses) + 1 for losses in options.values()) <= few:
        ways = [[None, *losses] for losses in options.values()]
        for way in itertools.product(*ways):
            yield {node: loss for node, loss in zip(options, way, strict=True) if loss is not None}
        return
    recent = list(options)[-RECENT:]
    worst = {node: losses[0] for node, losses in options.items() if losses}
    yield {}
    yield worst
    for node in () if only_ends else recent:
        for loss in options[node]:
            yield {node: loss}
        yield {other: loss for other, loss in worst.items() if other != node}


def _left_of(
    world: World, node: int, done: list[Effect], may: Unsure, lost: frozenset[int], persistence: Persistence
) -> list[Loss]:
    """The contents of a file that can be left besides the complete file, the least complete first."""
    stops = [index for index, change in enumerate(done) if change.operation.number in lost]
    if stops:  # the truncation is not in the journal, so the file is as before it
        before = done[: stops[0]]
        return [Loss(world.content_after(node, before), tuple(change.operation for change in done[stops[0] :]))]
    safe = may.safe(node, lost)
    before, after = done[:safe], done[safe:]
    if not after:
        return []
    content, whole = world.content_after(node, before), world.content_after(node, done)
    truncated = [index for index, change in enumerate(after) if change.size is not None]
    if truncated:
        cut = changed(content, after[: truncated[-1] + 1])
        bases = [cut] if may.in_order else [cut, content]
    else:
        bases = [content]
    base = bases[0]
    start, end = base.size, whole.size
    lost_all = tuple(change.operation for change in after)
    found = [Loss(base, lost_all) for base in bases]
    low, high = _span(after, start, end)
    unit = _PAGE if high - low > _PAGE or persistence is not Persistence.STRICT else _SECTOR
    if high - low > unit:
        middle = low + max(unit, (high - low) // 2 // unit * unit)
        found.append(Loss(_mixed(whole, base, middle, high), lost_all))
        if persistence is not Persistence.EXT4:  # earlier bytes may be missing, and later bytes present
            found.append(Loss(_mixed(whole, base, low, low + unit, whole.size), lost_all))
    if persistence is Persistence.STRICT and end > start:
        found.append(Loss(_mixed(whole, base, low, high, whole.size), lost_all))
    return list({loss.content.digest: loss for loss in found if loss.content != whole}.values())


def _span(changes: Sequence[Effect], start: int, end: int) -> tuple[int, int]:
    """The first byte that the changes write, and the byte after the last."""
    extents = [change.extent for change in changes if change.extent is not None]
    if not extents:
        return min(start, end), max(start, end)
    return min(extent.offset for extent in extents), max(extent.end for extent in extents)


def _mixed(new: Content, old: Content, start: int, end: int, size: int | None = None) -> Content:
    """The new file, with the old bytes from `start` to before `end`. `size`: its size; None: the size of the new
    file."""
    mixed = new.zeroed(start, end)
    for extent in old.between(start, end):
        mixed = mixed.written(extent)
    return mixed.truncated(size if size is not None else max(start, old.size) if end >= new.size else new.size)
