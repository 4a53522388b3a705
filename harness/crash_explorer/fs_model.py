"""The effect of each operation of a recording, and the contents of the checkpoint folder that a death can leave. States
with equal files are tried once. If there are too many states, a sample that covers the likely bugs is tried.

Files and folders are numbers (nodes) instead of paths, so that an operation means the same in any order of the
operations."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from torchaos.harness.crash_explorer.folder_contents import Blobs, Content, Extent, Tree
from torchaos.harness.crash_explorer.operations import Operation, OperationKind, Recording


@dataclass(frozen=True)
class State:
    """One possible content of the folder after a death of the job, and the moments of death that leave this content."""

    name: str  # the same in each exploration of the same recording
    model: str  # the model of death: `process death`, `node death`, or `power loss` and its persistence model
    died_at_step: int | None  # the highest step in which a rank was at its last operation; None: unknown
    tree: Tree
    last_operation: Operation | None  # the last operation that changed the files, in the recorded order; None: none
    operations: int  # the number of operations before the death; a state with fewer is simpler
    blobs: Blobs = field(compare=False, repr=False)
    linked: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # see Blobs.make_tree
    moments: tuple[tuple[float, float], ...] = ()  # (begin, end) of deaths in the recorded run that leave this state,
    # seconds of CLOCK_MONOTONIC. Empty: only possible if the ranks' operations come in another order than recorded.
    lost: tuple[Operation, ...] = ()  # after a loss of power: operations whose changes are missing, wholly or in part
    done: Mapping[int | None, int] | None = None  # operations done by each rank; None: all up to `last_operation`
    damage: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)  # the events of a fault that hit the files

    @property
    def digest(self) -> str:
        """A digest. Equal for states with equal files."""
        return self.tree.digest

    def write_to(self, folder: Path) -> None:
        """Makes the files in `folder`, which must be empty or missing. Raises OSError if a file can't be made."""
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


class StateSet:
    """Gathers the states of one model of death. Deaths that leave equal files become one state: the first, with the
    moments of all."""

    def __init__(self, recording: Recording, model: str, name: str) -> None:
        """`name`: the beginning of the names of the states."""
        self._recording, self._model, self._name = recording, model, name
        self._found: dict[str, tuple[State, list[tuple[float, float]]]] = {}

    def add(
        self, tree: Tree, operations: Sequence[Operation], moments: Iterable[tuple[float, float]],
        lost: tuple[Operation, ...] = (), done: Cut | None = None,
    ) -> None:  # fmt: skip
        """Adds a state. `operations`: the operations before the death, in the recorded order."""
        if tree.digest not in self._found:
            steps = [operation.step for operation in operations if operation.step is not None]
            state = State(
                f"{self._name}-{tree.digest[:12]}", self._model, max(steps, default=None), tree,
                operations[-1] if operations else None, len(operations), self._recording.blobs,
                self._recording.kept_as_made, lost=lost, done=done,
            )  # fmt: skip
            self._found[tree.digest] = state, []
        self._found[tree.digest][1].extend(moments)

    def __iter__(self) -> Iterator[State]:
        return (replace(state, moments=joined(moments)) for state, moments in self._found.values())


Feature = tuple[object, ...]


@dataclass(frozen=True)
class Chosen:
    """The states to try. `equal`: for each of them, all states of any model with the same files; the state itself comes
    first."""

    equal: tuple[tuple[State, ...], ...]
    there_are: int  # the number of states with different files

    @property
    def states(self) -> tuple[State, ...]:
        return tuple(group[0] for group in self.equal)

    @property
    def in_words(self) -> str:
        said = f"A death can leave {self.there_are} different contents of the checkpoint folder"
        if len(self.equal) == self.there_are:
            return f"{said}; all are tried"
        return (
            f"{said}; {len(self.equal)} are tried, chosen so that each operation is the last one, each change is lost, "
            "and each two change places"
        )


def choose(states: Iterable[State], most: int | None = None, seed: int = 0) -> Chosen:
    """At most `most` states with different files, the simplest first. States of moments of the recorded run come before
    states that only another order of the ranks can leave. The seed reproduces the choice."""
    groups: dict[str, list[State]] = {}
    for state in states:
        groups.setdefault(state.digest, []).append(state)
    for group in groups.values():
        group.sort(key=lambda state: (not state.moments, bool(state.lost), state.operations, state.model))
    found = sorted(groups.values(), key=lambda group: (group[0].operations, len(group[0].lost), group[0].name))
    kept = found if most is None or len(found) <= most else _covering(found, most, random.Random(seed))
    return Chosen(tuple(map(tuple, kept)), len(found))


def _covering(found: Sequence[list[State]], most: int, draw: random.Random) -> list[list[State]]:
    """The states in groups, each in random order: first states with each operation as the last before the death; then
    with each loss; then with each pair of changes in the wrong order; then all others."""
    order = sorted(range(len(found)), key=lambda index: (not found[index][0].moments, draw.random()))
    features = {index: {each for state in found[index] for each in _features(state)} for index in order}
    kept: dict[int, None] = {}
    covered: set[Feature] = set()
    for kind in ("last", "lost", "before"):
        for index in order:
            if any(each[0] == kind for each in features[index] - covered):
                kept[index] = None
                covered |= features[index]
    return [found[index] for index in sorted([*kept, *(index for index in order if index not in kept)][:most])]


def _features(state: State) -> Iterator[Feature]:
    last = state.last_operation.number if state.last_operation else None
    yield "last", state.model, last
    for operation in state.lost:
        yield "lost", state.model, operation.number
        if len(state.lost) == 1:
            yield "before", state.model, operation.number, last


Cut = Mapping[int | None, int]  # how many operations each rank has done; None: processes of no rank
ROOT = 0  # the folder itself
SYNCS = (OperationKind.FSYNC, OperationKind.FDATASYNC, OperationKind.FSYNC_FOLDER)
_REMOVALS = (OperationKind.UNLINK, OperationKind.RMDIR, OperationKind.RENAME)  # of an entry
_NEW = {OperationKind.CREATE: "file", OperationKind.MKDIR: "folder", OperationKind.SYMLINK: "link:"}


@dataclass(frozen=True)
class Effect:
    """The change that an operation makes. A node is a file, a folder or a symbolic link, whatever its names are."""

    operation: Operation
    node: int | None  # the node that changes; None: it did not exist
    entries: tuple[tuple[int, str, int | None], ...] = ()  # folder, name, node (None: the name is gone)
    extent: Extent | None = None  # of a write
    size: int | None = None  # of a truncate
    replaces: bool = False  # a rename onto a file
    needs: frozenset[int] = frozenset()  # operations of other ranks that must come before it

    @property
    def data(self) -> bool:
        return self.extent is not None or self.size is not None

    @property
    def visible(self) -> bool:
        """Whether the effect changes the files."""
        return self.data or bool(self.entries)


def changes_by_file(effects: Iterable[Effect]) -> dict[int, list[Effect]]:
    """The changes of data among these effects, in order, by file."""
    changes: dict[int, list[Effect]] = {}
    for effect in effects:
        if effect.data and effect.node is not None:
            changes.setdefault(effect.node, []).append(effect)
    return changes


class FilesystemModel:
    """The effects of a recording in order, and the tree that any subset of them makes."""

    def __init__(self, recording: Recording) -> None:
        self._stored = recording.stored
        self._numbers = count(ROOT + 1)
        self._kinds: dict[int, str] = {ROOT: "folder"}  # by node: file, folder, or the target of a symbolic link
        self._entries: dict[tuple[int, str], int] = {}  # while the effects are found
        self._first: dict[int, Content] = {}  # contents of files that existed before the recording, or were put
        self._start(recording.base)
        self.base = dict(self._entries)
        self._files: dict[int, int] = {}  # node by the recorder's number
        self._changed: dict[tuple[int, str], Operation] = {}  # the operation that changed an entry last
        self._made: dict[int, Operation] = {}
        self._written: dict[int, dict[int | None, list[tuple[Operation, int, int]]]] = {}
        self.effects = tuple(self._effect(operation) for operation in recording.operations)
        self.index = {
            line[i].number: i for line in recording.lines.values() for i in range(len(line))
        }  # place in its rank
        self._structure = [effect for effect in self.effects if effect.entries]
        self.changes: dict[int, list[Effect]] = {}  # changes of each file's data, in order
        for effect in self.effects:
            if effect.data and effect.node is not None:
                self.changes.setdefault(effect.node, []).append(effect)
        self._by = {node: _only({change.operation.rank for change in made}) for node, made in self.changes.items()}
        self._indices = {
            node: [self.index[change.operation.number] for change in made] for node, made in self.changes.items()
        }
        self._contents: dict[tuple[int, int], Content] = {}

    def is_file(self, node: int) -> bool:
        return self._kinds[node] == "file"

    def before(self, node: int) -> Content:
        """The content of the file before the recording, or when it was put into the store; empty if it did not
        exist."""
        return self._first.get(node, Content())

    def content(self, node: int, done: int) -> Content:
        """The content of the file after the first `done` of the changes to it."""
        key = (node, done)
        if key not in self._contents:
            low = done - 1
            while low > 0 and (node, low) not in self._contents:
                low -= 1
            content = self._contents.get((node, low), self.before(node))
            self._contents[key] = changed(content, self.changes[node][max(low, 0) : done]) if done else content
        return self._contents[key]

    def content_after(self, node: int, changes: Sequence[Effect]) -> Content:
        """The content of the file after these changes."""
        first = self.changes.get(node, ())[: len(changes)]
        if all(a is b for a, b in zip(first, changes, strict=True)):
            return self.content(node, len(changes))
        return changed(self.before(node), changes)

    def tree(self, cut: Cut, half: frozenset[int] = frozenset()) -> Tree:
        """The tree after each rank has done the number of operations that `cut` says. `half`: the numbers of writes
        that were interrupted. The first half of their bytes is written as well, in whole units of 4096 bytes."""
        structure = (effect for effect in self._structure if self.has(cut, effect.operation))
        return self.made(structure, lambda node: self._content_at(node, cut, half))

    def tree_of(self, effects: Sequence[Effect]) -> Tree:
        """The tree after these effects."""
        changes = changes_by_file(effects)
        structure = [effect for effect in effects if effect.entries]
        return self.made(structure, lambda node: self.content_after(node, changes.get(node, [])))

    def has(self, cut: Cut, operation: Operation) -> bool:
        """Whether the operation's rank has done the operation at this cut."""
        return self.index[operation.number] < cut.get(operation.rank, 0)

    def done(self, node: int, cut: Cut) -> list[Effect]:
        """The changes of a file's data that are done at this cut."""
        changes = self.changes.get(node, [])
        by = self._by[node] if changes else None
        if by is None:  # by no rank, or by several ranks
            return [change for change in changes if self.has(cut, change.operation)]
        return changes[: bisect_left(self._indices[node], cut.get(by[0], 0))]

    def _content_at(self, node: int, cut: Cut, half: frozenset[int]) -> Content:
        content = self.content_after(node, self.done(node, cut))
        torn = [change for change in self.changes.get(node, ()) if change.operation.number in half] if half else []
        return changed(content, [part(change) for change in torn])

    def made(self, structure: Iterable[Effect], content: Callable[[int], Content]) -> Tree:
        """The tree after these changes of names. `content`: a function that returns the content of a file."""
        entries = dict(self.base)
        for effect in structure:
            for folder, name, node in effect.entries:
                if node is not None:
                    entries[folder, name] = node
                elif self._stored or entries.get((folder, name)) == effect.node:
                    entries.pop((folder, name), None)
        files, folders, links = {}, set(), {}
        for path, node in self._paths(entries):
            kind = self._kinds[node]
            if kind == "folder":
                folders.add(path)
            elif kind == "file":
                files[path] = content(node)
            else:
                links[path] = kind.removeprefix("link:")
        if self._stored:
            folders = {str(folder) for path in files for folder in PurePosixPath(path).parents[:-1]}
        return Tree(files, frozenset(folders), links)

    def _paths(self, entries: Mapping[tuple[int, str], int]) -> Iterator[tuple[str, int]]:
        """The path and the number of each node that can be reached from the root. A folder comes before its
        contents."""
        inside: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), node in entries.items():
            inside.setdefault(folder, []).append((name, node))
        open_ = [("", ROOT)]
        while open_:
            above, folder = open_.pop()
            for name, node in inside.get(folder, ()):
                yield above + name, node
                if self._kinds[node] == "folder":
                    open_.append((f"{above}{name}/", node))

    def _start(self, base: Tree) -> None:
        for path in () if self._stored else sorted(base.folders):
            self._enter(path, self._new("folder"))
        for path, content in base.files.items():
            node = self._new("file")
            self._first[node] = content
            self._enter(path, node)
        for path, to in base.links.items():
            self._enter(path, self._new(f"link:{to}"))

    def _new(self, kind: str) -> int:
        node = next(self._numbers)
        self._kinds[node] = kind
        return node

    def _enter(self, path: str, node: int) -> None:
        self._entries[self._place(path)] = node

    def _place(self, path: str) -> tuple[int, str]:
        """The folder and the name of a path. If the recorder has missed the folder, the folder is the root. In a store,
        the name is the whole key."""
        if self._stored:
            return ROOT, path
        *above, name = path.split("/")
        folder = ROOT
        for part_ in above:
            folder = self._entries.get((folder, part_), ROOT)
        return folder, name

    def _along(self, path: str) -> list[tuple[int, str]]:
        parts = path.split("/") if path else []
        return [self._place("/".join(parts[: end + 1])) for end in range(len(parts))]

    def _effect(self, operation: Operation) -> Effect:
        kind, path = operation.kind, operation.path
        place = self._place(path) if path else None
        there = ROOT if place is None else self._entries.get(place)
        by_handle = self._files.get(operation.file) if operation.file is not None else None
        along = (*self._along(path), *self._along(operation.to or ""))
        seen = [self._changed[at] for at in along if at in self._changed]
        if kind in (OperationKind.WRITE, OperationKind.TRUNCATE, OperationKind.CLOSE, *SYNCS) and by_handle is not None:
            there, seen = by_handle, []  # the operation names an open file, so names don't matter
        if kind in _REMOVALS and there is not None and place is not None:
            seen += self._inside(there)
        made = self._made_by(operation, place, there)
        node = made.node
        if operation.file is not None and node is not None:
            self._files[operation.file] = node
        if node is not None and (made.extent is not None or made.size is not None):
            seen += self._overlapping(operation, node, made.extent)
        if node in self._made:
            seen.append(self._made[node])
        for folder, name, entry in made.entries:
            self._changed[folder, name] = operation
            if entry is None:
                self._entries.pop((folder, name), None)
            else:
                self._entries[folder, name] = entry
                self._made.setdefault(entry, operation)
        return replace(made, needs=frozenset(other.number for other in seen if other.rank != operation.rank))

    def _made_by(self, operation: Operation, place: tuple[int, str] | None, there: int | None) -> Effect:
        """The effect of an operation, without what it needs. `there`: the file or folder at `place`, or the open
        file."""
        kind = operation.kind
        if kind is OperationKind.CREATE and there is not None and self._kinds[there] == "file":
            return Effect(operation, there, size=0)
        if kind in _NEW:
            assert place is not None
            node = self._new(_NEW[kind] + (operation.to or "" if kind is OperationKind.SYMLINK else ""))
            return Effect(operation, node, ((*place, node),))
        if kind is OperationKind.PUT and operation.blob is not None:
            node = self._new("file")
            extents = (Extent(0, operation.size, operation.blob),) if operation.size else ()
            self._first[node] = Content(operation.size, extents)
            return Effect(operation, node, ((ROOT, operation.path, node),))
        if kind is OperationKind.UNLINK and self._stored:  # also if it does not exist here: in another order it may
            return Effect(operation, there, ((ROOT, operation.path, None),))
        if kind is OperationKind.WRITE and operation.blob is not None:
            return Effect(operation, there, extent=Extent(operation.offset, operation.size, operation.blob))
        if kind is OperationKind.TRUNCATE:
            return Effect(operation, there, size=operation.size)
        if there is not None and kind is OperationKind.LINK:
            return Effect(operation, there, ((*self._place(operation.to or ""), there),))
        if there is None or place is None or kind not in _REMOVALS:
            return Effect(operation, there)
        if kind is not OperationKind.RENAME:
            return Effect(operation, there, ((*place, None),))
        to = self._place(operation.to or "")
        replaces = to in self._entries and self._kinds[there] == "file"
        return Effect(operation, there, ((*place, None), (*to, there)) if to != place else (), replaces=replaces)

    def _inside(self, node: int) -> list[Operation]:
        """The last change of each entry below a folder. When the folder is renamed or removed, these come first."""
        found = [by for (folder, _name), by in self._changed.items() if folder == node]
        below = [child for (folder, _name), child in self._entries.items() if folder == node]
        return found + [by for child in below if self._kinds[child] == "folder" for by in self._inside(child)]

    def _overlapping(self, operation: Operation, node: int, extent: Extent | None) -> list[Operation]:
        """The last changes of the same bytes by other ranks. Such changes keep their recorded order."""
        start, end = (extent.offset, extent.end) if extent else (operation.size, 1 << 63)
        written = self._written.setdefault(node, {})
        others = [each for rank, made in written.items() if rank != operation.rank for each in made]
        written.setdefault(operation.rank, []).append((operation, start, end))
        return [by for by, low, high in others if low < end and start < high]


def _only(ranks: set[int | None]) -> tuple[int | None] | None:
    """The rank in a tuple, if there is only one. Otherwise None."""
    return (ranks.pop(),) if len(ranks) == 1 else None


def changed(content: Content, changes: Iterable[Effect]) -> Content:
    """The content of the file after these changes of its data."""
    for change in changes:
        if change.extent is not None:
            content = content.written(change.extent)
        elif change.size is not None:
            content = content.truncated(change.size)
    return content


def part(change: Effect, unit: int = 4096) -> Effect:
    """A write of the first half of the bytes, in whole units of `unit` bytes."""
    assert change.extent is not None
    whole = change.extent
    half = max(unit, whole.size // 2 // unit * unit)
    return Effect(
        change.operation, change.node, extent=Extent(whole.offset, min(half, whole.size), whole.blob, whole.start)
    )
