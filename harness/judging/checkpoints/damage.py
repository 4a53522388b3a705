"""What a job did about damage to its checkpoints: loaded it, refused it, fell back, or gave up. Pure.

A damaged file is dangerous from when a fault damaged it until it is taken back, or the job has moved, removed or
replaced it. An attempt *meets* the damage when it resumes in that time.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import Evidence
from torchaos.harness.judging.checkpoints.points import are_copies, points_of
from torchaos.harness.record.history import Attempt, Load, saved_as
from torchaos.harness.record.history.checkpoints import final_path, whole_loads
from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Damage:
    """One change to one file of a checkpoint."""

    fault: str
    checkpoint: str
    step: int | None  # global
    file: str
    op: str
    at_s: float
    until_s: float
    event: Event

    @property
    def contents(self) -> bool:
        """Whether what the checkpoint holds is not what was saved; a tracker or permissions change nothing of it."""
        return self.op not in ("mode", "text")

    @property
    def words(self) -> str:
        return str(self.event.data["effect"])


class Did(str, Enum):
    LOADED = "loaded it"
    FELL_BACK = "went back to an older checkpoint"
    COPED = "went on from the newest checkpoint all the same"
    ENDED = "ended without a step"
    WENT_ON = "had a newer checkpoint"
    UNKNOWN = "resumed from nobody knows what"


@dataclass(frozen=True)
class Meeting:
    """One attempt that resumed, or tried to, while a checkpoint was damaged."""

    attempt: Attempt
    damage: Damage
    did: Did
    tried: bool  # it was seen to load the damaged one, whether or not that worked
    best: tuple[str, int] | None  # the newest whole checkpoint there was: path and step
    loads: tuple[Load, ...]  # that it made before its first step

    @property
    def lost(self) -> int:
        """Steps beyond what had to be lost: a newer checkpoint than the one it took was whole."""
        base = self.attempt.base
        return 0 if self.best is None or base is None else max(0, self.best[1] - base)


def damages(record: Record, fault: str | None = None) -> list[Damage]:
    return [
        _damage(record, event)
        for event in record.of_kind(Kind.EFFECT)
        if event.data.get("what") == "damaged" and fault in (None, event.data["fault"])
    ]


def meetings(record: Record, fault: str | None = None) -> list[Meeting]:
    """In order of attempt."""
    found = damages(record, fault)
    met = [_meeting(record, attempt, one, found) for attempt in record.history.attempts for one in found]
    return [one for one in met if one is not None]


def felt(record: Record, fault: str) -> Evidence | None:
    """An attempt came upon the damage: it loaded it, or would have, and did something else."""
    for one in meetings(record, fault):
        harmless = one.did is Did.LOADED and not one.damage.contents
        if one.did in (Did.WENT_ON, Did.UNKNOWN) or harmless:
            continue
        when = f"when attempt {one.attempt.number} resumed"
        event = one.damage.event
        return Evidence(f"{one.damage.words} {when}, and it {in_words(one)}", ((event.source, event.seq),))
    return None


def in_words(one: Meeting) -> str:
    if one.did is Did.LOADED:
        return f"loaded {_name(one.damage.checkpoint)}"
    if one.did is Did.COPED:
        return str(one.did.value)
    tried = "tried it and " if one.tried else ""
    if one.did is Did.FELL_BACK:
        return f"{tried}went on from step {one.attempt.base}"
    return f"{tried}{one.did.value}"


def counts(record: Record, attempt: int) -> bool:
    """Whether any step of the attempt is part of the history that counts, or may be."""
    return attempt in record.history.unplaced or any(
        one.attempt == attempt for one in record.history.counting().values()
    )


def _damage(record: Record, event: Event) -> Damage:
    data, fault = event.data, str(event.data["fault"])
    names = {str(data["file"]), _renamed(record, fault, str(data["file"]))}
    ends = [
        later.mono_s
        for later in record.of_fault(fault, Kind.EFFECT, Kind.ROLLED_BACK)
        if later.mono_s > event.mono_s
        and (later.kind is Kind.ROLLED_BACK or (later.data.get("what") == "gone" and later.data.get("file") in names))
    ]
    path = _named_since(record, fault, str(data["file"]), str(data["checkpoint"]))
    step = _step(record, path, data.get("step"), event.mono_s)
    return Damage(
        fault, path, step, str(data["file"]), str(data["op"]), event.mono_s, min(ends, default=math.inf), event
    )


def _renamed(record: Record, fault: str, file: str) -> str:
    """Where a file is that was damaged while it was saved: the job gives it its final name afterwards."""
    moves = (event.data for event in record.of_fault(fault, Kind.EFFECT) if event.data.get("what") == "renamed")
    return next((str(one["to"]) for one in moves if one["file"] == file), file)


def _named_since(record: Record, fault: str, file: str, checkpoint: str) -> str:
    """The checkpoint's own name, likewise."""
    now, inside = _renamed(record, fault, file), file[len(checkpoint) :]
    return now[: len(now) - len(inside)] if now != file and now.endswith(inside) else final_path(checkpoint)


def _step(record: Record, path: str, told: object, by_s: float) -> int | None:
    save = saved_as(path, record.history.saves, by_s)
    if save is not None and save.global_step is not None:
        return save.global_step
    return told if isinstance(told, int) else None


def _meeting(record: Record, attempt: Attempt, one: Damage, all_: Sequence[Damage]) -> Meeting | None:
    first = min((done.mono_s for done in record.history.executions if done.attempt == attempt.number), default=None)
    loads = tuple(
        load for load in record.history.loads
        if load.attempt == attempt.number and (first is None or load.mono_s <= first)
    )  # fmt: skip
    over = max((load.mono_s for load in loads), default=first if first is not None else attempt.ended_s or math.inf)
    if not (one.at_s < over and attempt.started_s < one.until_s):
        return None
    met = [load for load in loads if load.mono_s > one.at_s]
    tried = any(_touches(load.path, one) for load in met)
    best = _best(record, one, all_, over)
    return Meeting(attempt, one, _did(attempt, one, met, first), tried, best, loads)


def _did(attempt: Attempt, one: Damage, loads: Sequence[Load], first: float | None) -> Did:
    if first is None:
        return Did.ENDED
    # The last one that worked counts, among the checkpoints: weights to start from may come from anywhere.
    here = f"{posixpath.dirname(one.checkpoint)}/"
    taken = next((load for load in reversed(whole_loads(loads)) if load.path.startswith(here)), None)
    if taken is not None and _touches(taken.path, one) and taken.mono_s < one.until_s:
        return Did.LOADED
    if attempt.base is None:
        return Did.UNKNOWN
    if taken is None and one.step is not None and attempt.base == one.step and one.op != "text":
        return Did.LOADED  # no load of any checkpoint was seen, and there it went on
    if one.step is not None and attempt.base > one.step:
        return Did.WENT_ON
    if one.op == "text" and attempt.base == one.step:
        return Did.COPED
    return Did.FELL_BACK


def _touches(path: str, one: Damage) -> bool:
    """Whether loading `path` is loading the damaged checkpoint, or a part of it."""
    inside = path == one.checkpoint or path.startswith(f"{one.checkpoint}/")
    return one.op != "text" and (inside or one.checkpoint.startswith(f"{path}/"))


def _best(record: Record, one: Damage, all_: Sequence[Damage], by_s: float) -> tuple[str, int] | None:
    hit = [other for other in all_ if other.op != "text" and other.at_s <= by_s]
    whole = [*_surveyed(record, one), *_saved_since(record, one.at_s, by_s)]
    points = points_of(record)
    sound = (
        found for found in whole
        if points.has(found[0]) and not any(_is_part(final_path(found[0]), other.checkpoint) for other in hit)
        and not any(_is_beside(*found, other) and not are_copies(record, found[0], other.checkpoint) for other in hit)
    )  # fmt: skip
    return max(sound, key=lambda found: found[1], default=None)


def _is_beside(path: str, step: int | None, one: Damage) -> bool:
    """Whether a file lies in one folder with the damaged one, and is of the same step: a part of one checkpoint, or a
    copy of it."""
    folders = {posixpath.dirname(path), posixpath.dirname(one.checkpoint)}
    return len(folders) == 1 and step == one.step and bool(posixpath.splitext(path)[1])


def _is_part(path: str, checkpoint: str) -> bool:
    return path == checkpoint or path.startswith(f"{checkpoint}/") or posixpath.splitext(checkpoint)[0] == path


def _surveyed(record: Record, one: Damage) -> Iterator[tuple[str, int]]:
    """What was there when the fault came."""
    said = (e for e in record.of_fault(one.fault, Kind.EFFECT) if e.data.get("what") == "survey")
    seen = [event for event in said if event.mono_s <= one.at_s]
    for raw in seen[-1].data["checkpoints"] if seen else ():
        step = _step(record, str(raw["path"]), raw["step"], one.at_s)
        if step is not None:
            yield str(raw["path"]), step


def _saved_since(record: Record, at_s: float, by_s: float) -> Iterator[tuple[str, int]]:
    for save in record.history.saves:
        if save.ok and save.ended_s is not None and at_s < save.ended_s < by_s and save.global_step is not None:
            yield save.path, save.global_step


def _name(path: str) -> str:
    return posixpath.basename(path)
