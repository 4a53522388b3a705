"""Describes what a death left of each file: whole, cut short, missing, or older than the death."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torchaos.harness.exploring.operations import Kind, Operation, Recording
from torchaos.harness.exploring.states.state import State
from torchaos.harness.exploring.tree import Content

_NEAR = 40  # operations before and after the death, whose files are named


def files_of(state: State, recording: Recording) -> tuple[tuple[str, str], ...]:
    """Each file that was about to change when the job died, and its state after the death in words. Paths are relative
    to the checkpoint folder. Files of a folder that is not there are left out: the folder is said to be missing.
    Missing objects of a store are named, because a store has no folders."""
    last = state.last_operation.number if state.last_operation else -1
    numbers = {operation.number: place for place, operation in enumerate(recording.operations)}
    at = numbers.get(last, -1)
    episode = _episode(recording.operations, at)
    sizes = _wanted_sizes(episode, last)
    paths = (path for operation in episode for path in (operation.path, operation.to) if path)
    put = {operation.path for operation in episode if operation.kind is Kind.PUT}
    named = (path for path in paths if path in put or path.rpartition("/")[0] in state.tree.names)
    told = {path: _in_words(path, state, sizes) for path in named}
    return tuple(sorted(told.items()))


def _episode(operations: tuple[Operation, ...], at: int) -> tuple[Operation, ...]:
    """The operations of the save in which the job died: operations that follow each other without a longer pause."""
    if not operations:
        return ()
    at = max(0, at)
    gaps = [after.begun_s - before.ended_s for before, after in pairwise(operations)]
    usual = sorted(gaps)[int(len(gaps) * 0.8)] if gaps else 0.0
    pause = max(0.05, 5 * usual)
    first = at
    while first > 0 and gaps[first - 1] < pause and at - first < _NEAR:
        first -= 1
    end = at + 1
    while end < len(operations) and gaps[end - 1] < pause and end - at < _NEAR:
        end += 1
    return operations[first:end]


def _wanted_sizes(episode: tuple[Operation, ...], last: int) -> Mapping[str, int]:
    """By path: the size that each file had, or was about to get, when the job died. `last`: the number of the last
    operation before the death."""
    sizes: dict[str, int] = {}
    done: set[str] = set()  # files that were closed after the death: later operations belong to another save
    for operation in episode:
        path = operation.path
        if path in done:
            continue
        if operation.kind in (Kind.CREATE, Kind.TRUNCATE):
            sizes[path] = operation.size
        elif operation.kind is Kind.WRITE:
            sizes[path] = max(sizes.get(path, 0), operation.offset + operation.size)
        elif operation.kind is Kind.CLOSE and operation.number > last:
            done.add(path)
        elif operation.kind is Kind.RENAME and operation.to and operation.number <= last:
            moved = {old: size for old, size in sizes.items() if _is_below(old, path)}
            sizes |= {operation.to + old[len(path) :]: size for old, size in moved.items()}
    return sizes


def _in_words(path: str, state: State, sizes: Mapping[str, int]) -> str:
    content: Content | None = state.tree.files.get(path)
    if content is None:
        return "a folder" if path in state.tree.folders else "a link" if path in state.tree.links else "missing"
    written = sum(extent.size for extent in content.extents)
    wanted = sizes.get(path)
    if not content.size:
        return "empty"
    if wanted is None or (content.size >= wanted and written >= content.size):
        return "complete"
    if written < content.size:
        return f"torn: {written} of {content.size} bytes are there"
    return f"torn: {content.size} of {wanted} bytes"


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
