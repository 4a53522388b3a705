"""The checkpoints in the run's events: which were saved, after which step, with which files, and which were loaded.

A checkpoint is named by the file that holds the model; files beside it, such as the states of generators, follow it.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import (
    checkpoint_of,
    final_path,
    is_moved,
    is_related,
    is_renamed,
    number_in_name,
)
from torchaos.harness.record.steps import Executions

_COUNTS_OTHERWISE = re.compile(r"/random_states_\d+\.pkl$")  # Accelerate's: "step" is the batch of the epoch, or 0

Writer = tuple[int, int, int]  # a forked process: attempt, rank, its pid


@dataclass(frozen=True)
class Save:
    """One checkpoint file or folder that all its ranks wrote once."""

    path: str
    format: str
    attempt: int
    local_step: int  # steps completed in that attempt when the save began
    ranks: tuple[int, ...]
    begun_s: float
    ended_s: float | None  # None: the save never ended
    ok: bool  # every rank that began the save finished it
    blocked_s: float  # for how many seconds training waited, on the rank that waited longest
    global_step: int | None = None
    begun_step: int | None = None  # the global step when the save began, if that is later than `global_step`
    by_child: bool = False  # a process that a rank has forked wrote a part of it
    children_ended: bool = False  # all of these processes have ended with exit code 0

    @property
    def in_thread(self) -> bool:
        """Whether training continued during the save. Then the file may hold the state of an earlier step than that at
        which the save began."""
        return self.ended_s is not None and not self.blocked_s


@dataclass(frozen=True)
class Load:
    path: str
    attempt: int
    rank: int
    mono_s: float
    ok: bool
    numbers: Mapping[str, float] = field(default_factory=dict)  # step-like entries of the contents
    local_step: int = 0  # steps completed in that attempt when the load began
    missing: bool = False  # there was no such file


def read_saves(events: Iterable[Event], steps: Executions) -> list[Save]:
    """The saves, in the order in which they began, each with its final name. `steps`: all steps of the run."""
    events = list(_with_steps_of_ranks(events, steps))
    parts: dict[tuple[int, str, int], list[tuple[Event, Event | None]]] = defaultdict(list)
    open_at: dict[tuple[int, int, str], list[tuple[tuple[int, str, int], int]]] = defaultdict(list)
    for event in events:
        if event.kind not in (Kind.SAVE_BEGIN, Kind.SAVE_END):
            continue
        path = posixpath.normpath(str(event.data["path"]))
        who = (event.attempt or 0, event.rank or 0, path)
        if event.kind is Kind.SAVE_END and open_at[who]:
            key, at = open_at[who].pop(0)
            parts[key][at] = (parts[key][at][0], event)
        else:
            key = (who[0], path, event.step or 0)
            parts[key].append((event, event if event.kind is Kind.SAVE_END else None))
            if event.kind is Kind.SAVE_BEGIN:
                open_at[who].append((key, len(parts[key]) - 1))
    ended = {_writer(event) for event in events if event.kind is Kind.WRITER_ENDED}
    saves = [_save(key, pairs, ended) for key, pairs in parts.items()]
    for event in events:
        if event.kind is Kind.RENAMED:
            old, new = (posixpath.normpath(str(event.data[name])) for name in ("path", "to"))
            before = [save for save in saves if save.begun_s < event.mono_s]
            newest = {save.path: save.begun_s for save in sorted(before, key=lambda save: save.begun_s)}
            # An older save of the same path was overwritten: its file is not the one that is renamed.
            saves = [_under(save, old, new) if save.begun_s == newest.get(save.path) else save for save in saves]
    return saves


def _with_steps_of_ranks(events: Iterable[Event], steps: Executions) -> Iterator[Event]:
    """Corrects the steps of saves by processes that do not count them. A forked process knows only how many steps its
    rank had completed at the fork, and may live for many saves: its save counts as begun after all steps that the rank
    has completed by now (`in_thread` says what this means). A save of a rank that makes no steps, such as a writer,
    comes after the steps that the other ranks have completed by now."""
    trains = set(zip(steps.attempt.tolist(), steps.rank.tolist(), strict=True))
    for event in events:
        attempt = event.attempt or 0
        apart = (attempt, event.rank or 0) not in trains
        if event.kind is Kind.SAVE_BEGIN and ("child" in event.data or apart):
            own = (steps.attempt == attempt) & (apart | (steps.rank == event.rank)) & (steps.mono_s <= event.mono_s)
            event = replace(event, step=max(event.step or 0, int(steps.local_step[own].max(initial=0))))
        yield event


def _under(save: Save, old: str, new: str) -> Save:
    inside = save.path == old or save.path.startswith(f"{old}/")
    return replace(save, path=new + save.path[len(old) :]) if inside else save


def _save(key: tuple[int, str, int], pairs: Sequence[tuple[Event, Event | None]], ended: Collection[Writer]) -> Save:
    attempt, path, local_step = key
    ends = [end for _begin, end in pairs if end is not None]
    whole = len(ends) == len(pairs)
    writers = {_writer(begin) for begin, _end in pairs if "child" in begin.data}
    return Save(
        path, str(pairs[0][0].data.get("format", "")), attempt, local_step,
        tuple(sorted({begin.rank or 0 for begin, _end in pairs})), min(begin.mono_s for begin, _end in pairs),
        max(end.mono_s for end in ends) if whole else None, whole and all(end.data.get("ok") for end in ends),
        max((float(end.data.get("blocked_s") or 0.0) for end in ends), default=0.0), None, None, bool(writers),
        bool(writers) and writers <= set(ended),
    )  # fmt: skip


def _writer(event: Event) -> Writer:
    return event.attempt or 0, event.rank or 0, int(event.data["child"])


def read_loads(events: Iterable[Event]) -> list[Load]:
    return [
        Load(
            posixpath.normpath(str(event.data["path"])), event.attempt or 0, event.rank or 0, event.mono_s,
            bool(event.data.get("ok")), _numbers(event.data), event.step or 0, bool(event.data.get("missing")),
        )
        for event in events
        if event.kind is Kind.LOAD_END
    ]  # fmt: skip


_IN_A_ROW = 4  # steps


def without_exchanged(saves: Sequence[Save], loads: Sequence[Load]) -> tuple[list[Save], list[Load]]:
    """The saves and loads of checkpoints, without those of files that the steps themselves use, such as gradients that
    ranks exchange as files: a rank loads files of such names between many steps in a row."""
    places = defaultdict[tuple[int, int, str], set[int]](set)
    for load in loads:
        places[load.attempt, load.rank, _unnumbered(load.path)].add(load.local_step)
    used = {
        name for (_attempt, _rank, name), of in places.items() if any({*range(at, at + _IN_A_ROW)} <= of for at in of)
    }
    return (
        [save for save in saves if _unnumbered(save.path) not in used],
        [load for load in loads if _unnumbered(load.path) not in used],
    )


def _unnumbered(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def handled_paths(events: Iterable[Event]) -> set[str]:
    """The paths of all files and folders that were saved, or loaded without an error, under every name that they
    had."""
    found = set[str]()
    for event in events:
        if event.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END) or (event.kind is Kind.LOAD_END and event.data.get("ok")):
            found.add(posixpath.normpath(str(event.data["path"])))
        elif event.kind is Kind.RENAMED:
            old, new = (posixpath.normpath(str(event.data[name])) for name in ("path", "to"))
            found |= {new + path[len(old) :] for path in found if path == old or path.startswith(f"{old}/")}
    return found


def saved_as(path: str, saves: Iterable[Save], before_s: float = float("inf")) -> Save | None:
    """The save that wrote the data at `path`: the last complete save before `before_s` with the same path, a path
    inside it, or its parent. If there is none: a save whose file now has another suffix, or the same name in another
    folder."""
    path = final_path(posixpath.normpath(path))
    before = [(save, final_path(save.path)) for save in saves if save.begun_s < before_s]
    for same in (is_related, is_renamed, is_moved):
        near = [(save, final) for save, final in before if same(path, final)]
        if near:
            break
    near = [(save, final) for save, final in near if save.ok and (save.ended_s or 0.0) <= before_s] or near
    if len({save.path for save, _final in near}) > 1 and len({save.global_step for save, _final in near}) > 1:
        # One folder above many saves does not show which save it is.
        near = [(save, final) for save, final in near if final == path]
    return max((save for save, _final in near), key=lambda save: save.begun_s, default=None)


def whole_loads(loads: Sequence[Load]) -> list[Load]:
    """The successful loads. Left out is a load if the same rank failed to load another file of that checkpoint, and did
    not load it later: the job may then have continued from another checkpoint."""
    failed = {(load.rank, checkpoint_of(load.path)) for load in loads if is_failed(load, loads)}
    return [load for load in loads if load.ok and (load.rank, checkpoint_of(load.path)) not in failed]


def is_failed(load: Load, loads: Sequence[Load]) -> bool:
    """Whether a load failed, and the same rank did not load this file later."""
    later = (other for other in loads if other.ok and other.mono_s >= load.mono_s)
    return not load.ok and not any((other.rank, other.path) == (load.rank, load.path) for other in later)


def counts_steps(path: str, saves: Iterable[Save]) -> bool:
    """Whether the number in the name of a save is a number of steps, and not of saves. The name may show this. If not,
    the numbers of other saves show it: one of them is the step of its save, or they grow like the steps of their saves,
    perhaps later, because a thread may write late. `saves`: of the first attempt."""
    part = next((part for part in reversed(path.split("/")) if number_in_name(part) is not None), "")
    if re.search(r"(?:step|iter)[a-z]*[-_=]?\d", part, re.I):
        return True
    known = sorted((save.local_step, told) for save in saves if (told := number_in_name(save.path)) is not None)
    if not known:
        return False
    (first, first_told), (last, last_told) = known[0], known[-1]
    grows = last > first and 0.75 < (last_told - first_told) / (last - first) < 1.34
    return grows or any(step == told for step, told in known)


# The most reliable first. Plurals and totals may be settings, epochs are no steps, and a scheduler counts one step
# ahead.
_PROGRESS = ("global_step", "global_steps", "step", "iteration", "iter", "iter_num", "current_step", "train_step")
_OPTIMIZERS_OWN = re.compile(r"(?:^|\.)state\.\d+\.|optim", re.I)  # the count is behind if a GradScaler skipped steps


def number_in_contents(numbers: Mapping[str, float]) -> tuple[str, int] | None:
    """The entry that counts the steps of training, with its name. If several entries have the same name, the
    outermost."""
    for wanted in _PROGRESS:
        for name, value in sorted(numbers.items(), key=lambda item: item[0].count(".")):
            if name.rpartition(".")[2] == wanted and not _OPTIMIZERS_OWN.search(name):
                return name, int(value)
    return None


def _numbers(load: Mapping[str, Any]) -> dict[str, float]:
    value = None if _COUNTS_OTHERWISE.search(str(load["path"])) else load.get("numbers")
    entries = value.items() if isinstance(value, Mapping) else ()
    return {str(name): number for name, number in entries if isinstance(number, (int, float))}


def by_step(saves: Iterable[Save]) -> list[list[Save]]:
    """The saves of each checkpoint, in the order in which they began."""
    found: dict[tuple[int, int], list[Save]] = {}
    for save in sorted(saves, key=lambda save: save.begun_s):
        found.setdefault((save.attempt, save.local_step), []).append(save)
    return list(found.values())
