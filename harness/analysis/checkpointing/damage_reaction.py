"""The reaction of a job to damaged checkpoints: it loaded the damage, refused it, used an older checkpoint, or gave up.

A file counts as damaged from the time of the fault until the rollback, or until the job moves, removes or replaces the
file. An attempt *meets* the damage if it resumes in that time."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from torchaos.harness.analysis.checkpointing.checkpoint_contents import Deltas
from torchaos.harness.analysis.checkpointing.resume_points import are_copies, points_of
from torchaos.harness.interfaces import Evidence
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import checkpoint_of, final_path
from torchaos.harness.record.history import Attempt, Load, saved_as
from torchaos.harness.record.history.saves_and_loads import whole_loads
from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Damage:
    """One change that a fault made to one file of a checkpoint. Times are CLOCK_MONOTONIC, in seconds."""

    fault: str
    checkpoint: str
    step: int | None  # global
    file: str
    op: str  # the kind of change; "mode" is the permissions, "text" is a tracker file
    at_s: float
    until_s: float  # infinite: the file stayed damaged
    event: Event

    @property
    def contents(self) -> bool:
        """Whether the contents of the checkpoint changed, and not only its permissions or a tracker file."""
        return self.op not in ("mode", "text")

    @property
    def words(self) -> str:
        return str(self.event.data["effect"])


class Did(str, Enum):
    """The reaction of an attempt to damage, as a clause without its subject."""

    LOADED = "loaded it"
    FELL_BACK = "went back to an older checkpoint"
    COPED = "went on from the newest checkpoint anyway"
    ENDED = "ended without a step"
    WENT_ON = "had a newer checkpoint"
    UNKNOWN = "resumed from an unknown checkpoint"


@dataclass(frozen=True)
class Meeting:
    """An attempt that resumed, or tried to resume, while a checkpoint was damaged."""

    attempt: Attempt
    damage: Damage
    did: Did
    tried: bool  # a load of the damaged checkpoint was seen, successful or not
    best: tuple[str, int] | None  # the newest whole checkpoint at that time: path and global step
    loads: tuple[Load, ...]  # all loads before the attempt's first step
    upon: str = ""  # the name of the delta that it loaded, which builds upon the damaged checkpoint

    @property
    def lost(self) -> int:
        """The number of steps that were lost without need, because the attempt resumed from an older checkpoint than
        `best`."""
        base = self.attempt.base
        return 0 if self.best is None or base is None else max(0, self.best[1] - base)


def damages(record: Record, fault: str | None = None) -> list[Damage]:
    """The damage that a fault made. Without `fault`, all damage in the record."""
    return [
        _damage(record, event)
        for event in record.of_kind(Kind.EFFECT)
        if event.data.get("what") == "damaged" and fault in (None, event.data["fault"])
    ]


def meetings(record: Record, fault: str | None = None) -> list[Meeting]:
    damages_ = damages(record, fault)
    met = [_meeting(record, attempt, damage, damages_) for attempt in record.history.attempts for damage in damages_]
    return [meeting for meeting in met if meeting is not None]


def felt(record: Record, fault: str) -> Evidence | None:
    """Evidence that an attempt met the damage: it loaded the damaged checkpoint, or avoided a checkpoint that it would
    otherwise have loaded. None if no attempt was affected."""
    for meeting in meetings(record, fault):
        harmless = meeting.did is Did.LOADED and not meeting.damage.contents
        if meeting.did in (Did.WENT_ON, Did.UNKNOWN) or harmless:
            continue
        when = f"when attempt {meeting.attempt.number} resumed"
        event = meeting.damage.event
        return Evidence.of(f"{meeting.damage.words} {when}, and it {in_words(meeting)}", event)
    return None


def in_words(meeting: Meeting) -> str:
    """The reaction of the attempt, as a clause without its subject."""
    if meeting.did is Did.LOADED:
        name = _name(meeting.damage.checkpoint)
        return f"loaded {meeting.upon}, which builds upon {name}" if meeting.upon else f"loaded {name}"
    if meeting.did is Did.COPED:
        return str(meeting.did.value)
    tried = "tried it and " if meeting.tried else ""
    if meeting.did is Did.FELL_BACK:
        return f"{tried}went on from step {meeting.attempt.base}"
    return f"{tried}{meeting.did.value}"


def counts(record: Record, attempt: int) -> bool:
    """Whether a step of the attempt counts in the final history, or may count (see `History.counting`)."""
    return attempt in record.history.unplaced or bool((record.history.by_step().executions.attempt == attempt).any())


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
    """The final path of a file. A job renames a file that was damaged during its save later."""
    moves = (event.data for event in record.of_fault(fault, Kind.EFFECT) if event.data.get("what") == "renamed")
    return next((str(data["to"]) for data in moves if data["file"] == file), file)


def _named_since(record: Record, fault: str, file: str, checkpoint: str) -> str:
    now, inside = _renamed(record, fault, file), file[len(checkpoint) :]
    return now[: len(now) - len(inside)] if now != file and now.endswith(inside) else final_path(checkpoint)


def _step(record: Record, path: str, stated: object, by_s: float) -> int | None:
    save = saved_as(path, record.history.saves, by_s)
    if save is not None and save.global_step is not None:
        return save.global_step
    return stated if isinstance(stated, int) else None


def _meeting(record: Record, attempt: Attempt, damage: Damage, all_: Sequence[Damage]) -> Meeting | None:
    first = record.history.executions.of_attempt(attempt.number).first_s()
    loads = tuple(
        load for load in record.history.loads
        if load.attempt == attempt.number and (first is None or load.mono_s <= first)
    )  # fmt: skip
    over = max((load.mono_s for load in loads), default=first if first is not None else attempt.ended_s or math.inf)
    if not (damage.at_s < over and attempt.started_s < damage.until_s):
        return None
    met = [load for load in loads if load.mono_s > damage.at_s]
    tried = any(_may_read_damage(load.path, damage) for load in met)
    best, did = _best(record, damage, all_, over), _did(attempt, damage, met, first)
    upon = _upon(record, attempt, damage, met) if did is Did.WENT_ON else ""
    return Meeting(attempt, damage, Did.LOADED if upon else did, tried, best, loads, upon)


def _upon(record: Record, attempt: Attempt, damage: Damage, loads: Sequence[Load]) -> str:
    """The name of the delta that was loaded last, if it builds upon the damaged checkpoint. Otherwise empty."""
    loaded, deltas = next(iter(reversed(whole_loads(loads))), None), Deltas.of(record)
    if loaded and any(deltas.builds(loaded.path, one, damage.checkpoint) for one in range(attempt.number)):
        return _name(checkpoint_of(loaded.path))
    return ""


def _did(attempt: Attempt, damage: Damage, loads: Sequence[Load], first: float | None) -> Did:
    if first is None:
        return Did.ENDED
    # Only loads from the folder of the checkpoints count, because a job may load its initial weights from anywhere.
    here = f"{posixpath.dirname(damage.checkpoint)}/"
    loaded = next((load for load in reversed(whole_loads(loads)) if load.path.startswith(here)), None)
    if loaded is not None and _may_read_damage(loaded.path, damage) and loaded.mono_s < damage.until_s:
        return Did.LOADED
    if attempt.base is None:
        return Did.UNKNOWN
    if loaded is None and damage.step is not None and attempt.base == damage.step and damage.op != "text":
        return Did.LOADED  # no load was seen, but the attempt resumed from this checkpoint's step
    if damage.step is not None and attempt.base > damage.step:
        return Did.WENT_ON
    if damage.op == "text" and attempt.base == damage.step:
        return Did.COPED
    return Did.FELL_BACK


def _may_read_damage(path: str, damage: Damage) -> bool:
    """Whether a load of `path` may read the damage: it is the damaged checkpoint, a part of it, or a folder that
    contains it. Always False if the damaged file is a tracker file."""
    inside = path == damage.checkpoint or path.startswith(f"{damage.checkpoint}/")
    return damage.op != "text" and (inside or damage.checkpoint.startswith(f"{path}/"))


def _best(record: Record, damage: Damage, all_: Sequence[Damage], by_s: float) -> tuple[str, int] | None:
    hit = [other for other in all_ if other.op != "text" and other.at_s <= by_s]
    whole = [*_surveyed(record, damage), *_saved_since(record, hit, damage.at_s, by_s)]
    points = points_of(record)
    sound = (
        found for found in whole
        if points.has(found[0]) and not any(_is_part(final_path(found[0]), other.checkpoint) for other in hit)
        and not any(_is_beside(*found, other) and not are_copies(record, found[0], other.checkpoint) for other in hit)
    )  # fmt: skip
    return max(sound, key=lambda found: found[1], default=None)


def _is_beside(path: str, step: int | None, damage: Damage) -> bool:
    """Whether a file is in the same folder as the damaged file, and of the same step. Then it is a part or a copy of
    the same checkpoint."""
    folders = {posixpath.dirname(path), posixpath.dirname(damage.checkpoint)}
    return len(folders) == 1 and step == damage.step and bool(posixpath.splitext(path)[1])


def _is_part(path: str, checkpoint: str) -> bool:
    return path == checkpoint or path.startswith(f"{checkpoint}/") or posixpath.splitext(checkpoint)[0] == path


def _surveyed(record: Record, damage: Damage) -> Iterator[tuple[str, int]]:
    """Path and step of each checkpoint that existed when the fault was applied."""
    surveys = (e for e in record.of_fault(damage.fault, Kind.EFFECT) if e.data.get("what") == "survey")
    seen = [event for event in surveys if event.mono_s <= damage.at_s]
    for raw in seen[-1].data["checkpoints"] if seen else ():
        step = _step(record, str(raw["path"]), raw["step"], damage.at_s)
        if step is not None:
            yield str(raw["path"]), step


def _saved_since(record: Record, hit: Sequence[Damage], at_s: float, by_s: float) -> Iterator[tuple[str, int]]:
    """The checkpoints that were saved between the two times; without those that build upon a damaged one, or may."""
    deltas = Deltas.of(record)
    for save in record.history.saves:
        if not (save.ok and save.ended_s is not None and at_s < save.ended_s < by_s and save.global_step is not None):
            continue
        if all(deltas.builds(save.path, save.attempt, one.checkpoint) is False for one in hit):
            yield save.path, save.global_step


def _name(path: str) -> str:
    return posixpath.basename(path)
