"""Checks that a checkpoint holds the parameters that this run had at the checkpoint's step. A twin can't show a wrong
save, because it makes the same mistake. So the check sums of the parameters at the beginning of each save
(agent/state/state_check_sums.py) are compared with the check sums of the tensors in the checkpoints
(checkpoints/tensor_values.py).

A tensor should hold a parameter if it has the parameter's name, type and shape. Many such tensors rightly hold
something else: an average, a target network, the best model so far. So only checkpoints from which the job resumes are
judged, without tensors whose name or path says that they are averages or the like. A parameter is right if any tensor
of its name holds it, in this file or another file of the same step and use. And the checkpoint itself must state its
step, and the recorded save must agree, because a copy may be written a step late.

Also finds the step after which ranks that had held the same parameters no longer did."""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchaos.harness.analysis.checkpointing.checkpoint_contents import Checkpoint, checkpoints_of, root_of
from torchaos.harness.analysis.checkpointing.resume_points import family, points_of
from torchaos.harness.interfaces import Finding, First, What, failed
from torchaos.harness.protocol.check_sums import COPY, MODULUS, PART, SHARD, is_whole, plain_name
from torchaos.harness.protocol.wire import Event
from torchaos.harness.record.history import History
from torchaos.harness.record.history.snapshots import states
from torchaos.harness.record.record import Record

_DIGITS = 16


@dataclass
class Values:
    """The check sums of one parameter after one step. There are several if the parameter changed between two saves of
    the step, if the step was done again, or if ranks have different parameters of the same name."""

    kind: str  # type and shape of the parameter
    whole: set[int] = field(default_factory=set)  # sums of the whole parameter
    parts: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # sums of each rank's part
    sure: bool = True  # all ranks reported, and they agree, so no other sum is possible


class ParameterSums:
    def __init__(self, run: Record) -> None:
        self._values: dict[int, dict[str, Values]] = defaultdict(dict)
        for step, world, of_ranks in _snapshots(run):
            for name in dict.fromkeys(name for found in of_ranks.values() for name in found):
                own = {rank: found[name] for rank, found in of_ranks.items() if name in found}
                kind = next(iter(own.values()))[0]
                values = self._values[step].setdefault(name, Values(kind))
                _add({rank: text for rank, (_kind, text) in own.items()}, len(of_ranks) == world, values)

    @property
    def steps(self) -> list[int]:
        return sorted(self._values)

    def at(self, step: int) -> Mapping[str, Values]:
        return self._values.get(step, {})

    def total_at(self, step: int) -> int | None:
        """The plain sum of all parameters at the begin of the saves of a step. None if it is not known, or if the saves
        of the step differ."""
        found = self.at(step).values()
        if not found or not all(values.sure and len(values.whole) == 1 for values in found):
            return None
        return sum(total for values in found for total in values.whole) % MODULUS

    def parameter_of(self, step: int, entry: str) -> str | None:
        """The parameter that a tensor in a checkpoint is named after, or None. Prefixes from nested containers in the
        tensor's name are ignored."""
        parts = plain_name(entry.rpartition(":")[2]).split(".")
        names = (".".join(parts[place:]) for place in range(len(parts)))
        return next((name for name in names if name in self._values.get(step, {})), None)


def _add(texts: Mapping[int, str], complete: bool, values: Values) -> None:
    """Adds check sums. `texts`: by rank, the kind of the sum and its digits; `complete`: whether all ranks of the job
    reported."""
    sums = {rank: int(text[-_DIGITS:], 16) for rank, text in texts.items()}
    prefixes = {rank: text[:-_DIGITS] for rank, text in texts.items()}
    if all(prefix.startswith(PART) for prefix in prefixes.values()):
        by_place = {prefixes[rank]: part for rank, part in sums.items()}
        agree = all(by_place[prefixes[rank]] == part for rank, part in sums.items())
        values.sure &= complete and agree
        for rank, part in sums.items():
            values.parts[rank].add(part)
        if complete and agree:
            values.whole.add(sum(by_place.values()) % MODULUS)
    elif set(prefixes.values()) <= {SHARD, COPY}:
        values.sure &= complete
        for rank, part in sums.items():
            values.parts[rank].add(part)
        if complete:
            shards = (part for rank, part in sums.items() if prefixes[rank] == SHARD)
            values.whole.add(sum(shards) % MODULUS)
    elif set(prefixes.values()) == {""}:
        values.sure &= len(set(sums.values())) == 1
        values.whole |= set(sums.values())
    else:
        values.sure = False


def _snapshots(run: Record) -> Iterator[tuple[int, int, Mapping[int, Mapping[str, Sequence[str]]]]]:
    """Yields (global step, number of ranks in the job, check sums by rank and name) for each report of the
    ranks. There may be several reports in one step of one attempt."""
    found: dict[tuple[int, int, int], dict[int, Mapping[str, Sequence[str]]]] = defaultdict(dict)
    times: dict[tuple[int, int, int], int] = defaultdict(int)
    for state in states(run.beside_steps):
        event = state.event
        step, rank, attempt = step_of(run.history, event), event.rank or 0, event.attempt or 0
        if step is not None and not state.begun:
            found[attempt, step, times[attempt, step, rank]][rank] = state.sums["parameters"]
            times[attempt, step, rank] += 1
    worlds = {attempt.number: attempt.world_size for attempt in run.history.attempts}
    for (attempt, step, _time), of_ranks in found.items():
        yield step, worlds.get(attempt, 0), of_ranks


def step_of(history: History, event: Event) -> int | None:
    own = [segment for segment in history.segments if segment.number == (event.attempt or 0)]
    begun = [segment for segment in own if (segment.after, segment.started_s) < (event.step or 0, event.mono_s)] or own[
        :1
    ]
    return begun[-1].global_step(event.step or 0) if begun else None


_ASIDE = re.compile(
    r"(?<![a-z])(?:ema|averag|avg|swa|polyak|teacher|target|shadow|slow|best|anchor|prev|(?:ref|old|init)(?![a-z]))",
    re.I,
)


@dataclass(frozen=True)
class Wrong:
    """A checkpoint that does not hold the parameters of its step."""

    checkpoint: Checkpoint
    names: tuple[str, ...]  # the wrong parameters, in order
    mistake: str  # as a clause: "holds …", "lacks …"

    @property
    def in_words(self) -> str:
        more = len(self.names) - 1
        others = f" and {more} others" if more > 1 else " and 1 other" if more else ""
        return f"{self.checkpoint.at} is whole, and {self.mistake}: {self.names[0]}{others}"


@dataclass(frozen=True)
class _Entry:
    """A tensor in a checkpoint that has the name of a parameter."""

    name: str  # name of the parameter
    sum: int  # check sum of the tensor
    values: Values  # values of the parameter, after the checkpoint's step
    whole: bool  # the tensor has the parameter's type and shape as well
    aside: bool  # the tensor's name or path says that it holds another thing, such as an average

    @property
    def right(self) -> bool:
        return self.sum in self.values.whole or any(self.sum in part for part in self.values.parts.values())


class Held:
    """Compares each good checkpoint of a run with the parameters of its step."""

    def __init__(self, run: Record) -> None:
        self._kept, self._points, self._root = ParameterSums(run), points_of(run), root_of(run)
        listed = run.artifacts.get("inventory", {}).get("checkpoints") or []
        self._raw = {str(raw["path"]): raw for raw in listed}
        self._known: dict[str, list[_Entry]] = {}
        self._good = [checkpoint for checkpoint in checkpoints_of(run) or [] if checkpoint.good and self._kept.steps]

    @cached_property
    def wrong(self) -> Wrong | None:
        return next((found for checkpoint in self._good for found in self._of(checkpoint)), None)

    @property
    def finding(self) -> Finding | None:
        if self.wrong is None:
            return None
        checkpoint, names = self.wrong.checkpoint, self.wrong.names
        first = First(What.SAVED, checkpoint.step or 0)
        return failed(
            self.wrong.in_words,
            first,
            step=checkpoint.step,
            checkpoint=checkpoint.path,
            entry=names[0],
            entries=len(names),
        )

    @cached_property
    def right(self) -> int:
        """The number of checkpoints that hold at least one parameter of their step, as this run had it."""
        return sum(any(entry.right for entry in self._entries(checkpoint)) for checkpoint in self._good)

    def _of(self, checkpoint: Checkpoint) -> Iterator[Wrong]:
        stated = self._raw[checkpoint.path].get("step")
        if checkpoint.step is None or stated is None or not self._points.has(self._path(checkpoint)):
            return
        own, others = (
            self._entries(checkpoint),
            [other for other in self._good if other.step == checkpoint.step and other is not checkpoint],
        )
        alike = [entry for other in others if self._same_use(checkpoint, other) for entry in self._entries(other)]
        any_other = [entry for other in others for entry in self._entries(other)]
        off = _less_right([entry for entry in own if entry.whole and not entry.aside], [*own, *alike])
        yield from self._stale(checkpoint, stated, off)
        if stated == checkpoint.step:
            off = _less_right(off, any_other)
            yield from self._exchanged(checkpoint, off)
            yield from self._unknown(checkpoint, own, off)
            yield from self._doubled(checkpoint, own)
            yield from self._lacking(checkpoint, own)

    def _stale(self, checkpoint: Checkpoint, stated: int, off: Iterable[_Entry]) -> Iterator[Wrong]:
        for step in reversed(self._kept.steps):
            of_step = self._kept.at(step)
            names = [entry.name for entry in off if entry.name in of_step and entry.sum in of_step[entry.name].whole]
            if names and step not in (checkpoint.step, stated):
                mistake = f"holds the parameters of step {step}, not those of step {checkpoint.step}"
                yield Wrong(checkpoint, _each_once(names), mistake)

    def _exchanged(self, checkpoint: Checkpoint, off: Iterable[_Entry]) -> Iterator[Wrong]:
        there = self._kept.at(checkpoint.step or 0)
        for entry in off:
            for other, values in there.items():
                if other != entry.name and values.kind == entry.values.kind and entry.sum in values.whole:
                    yield Wrong(checkpoint, (entry.name,), f"holds {other} in place of another parameter")

    def _unknown(self, checkpoint: Checkpoint, own: Iterable[_Entry], off: Iterable[_Entry]) -> Iterator[Wrong]:
        """Finds tensors that hold no known values. If no parameter of the checkpoint is right, it is reported only if a
        load showed which checkpoints the job resumes from, because a job may save only an average."""
        names = _each_once(entry.name for entry in off if entry.values.sure)
        if names and (self._points.kinds or any(entry.right for entry in own)):
            yield Wrong(
                checkpoint,
                names,
                f"holds parameters of no step that was seen, instead of those of step {checkpoint.step}",
            )

    def _doubled(self, checkpoint: Checkpoint, own: list[_Entry]) -> Iterator[Wrong]:
        """Finds a part of a parameter that holds another rank's part. Then the number of parts is right, and one part
        is missing."""
        for name, values in self._kept.at(checkpoint.step or 0).items():
            there = [entry.sum for entry in own if entry.name == name and not entry.whole]
            parts = values.parts
            gone = [rank for rank, found in parts.items() if not found.intersection(there)]
            known = set[int]().union(*parts.values())
            if gone and values.sure and len(there) == len(parts) and known.issuperset(there):
                yield Wrong(checkpoint, (name,), f"holds another rank's part twice, and not that of rank {gone[0]}")

    def _lacking(self, checkpoint: Checkpoint, own: list[_Entry]) -> Iterator[Wrong]:
        """Finds a parameter that all other checkpoints of the family hold, but for which this checkpoint has no tensor,
        although it holds other parameters."""
        kin = [
            other for other in self._good if other is not checkpoint and family(other.path) == family(checkpoint.path)
        ]
        always = [{entry.name for entry in self._entries(other) if entry.right} for other in kin]
        if always and any(entry.right for entry in own):
            there = {entry.name for entry in own if not entry.aside}
            gone = set.intersection(*always) & self._kept.at(checkpoint.step or 0).keys() - there
            if gone:
                yield Wrong(checkpoint, tuple(sorted(gone)), "lacks the parameter that the others of its kind hold")

    def _entries(self, checkpoint: Checkpoint) -> list[_Entry]:
        if checkpoint.path not in self._known:
            self._known[checkpoint.path] = self._found(checkpoint)
        return self._known[checkpoint.path]

    def _found(self, checkpoint: Checkpoint) -> list[_Entry]:
        kinds = self._raw[checkpoint.path].get("kinds")
        kinds = kinds if isinstance(kinds, Mapping) else {}
        found = []
        for tensor, sketch in checkpoint.sketches.items():
            name = (
                self._kept.parameter_of(checkpoint.step or 0, tensor)
                if tensor in kinds and checkpoint.step is not None
                else None
            )
            if name is not None and sketch:
                values = self._kept.at(checkpoint.step or 0)[name]
                around = f"{checkpoint.path}:{tensor.removesuffix(name)}"
                whole = kinds[tensor] == values.kind
                found.append(_Entry(name, int(sketch[0]) % MODULUS, values, whole, bool(_ASIDE.search(around))))
        return found

    def _same_use(self, checkpoint: Checkpoint, other: Checkpoint) -> bool:
        return not self._points.kinds or self._points.has(self._path(other))

    def _path(self, checkpoint: Checkpoint) -> str:
        return posixpath.join(self._root, checkpoint.path)


def _less_right(off: Iterable[_Entry], among: Iterable[_Entry]) -> list[_Entry]:
    """`off` without the parameters of which an entry in `among` holds the right values."""
    right = {entry.name for entry in among if entry.right}
    return [entry for entry in off if entry.name not in right and entry.values.whole]


def _each_once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


class Apart(NamedTuple):
    step: int  # global
    attempt: int
    at_s: float  # when it was seen, CLOCK_MONOTONIC


def ranks_apart(run: Record) -> Apart | None:
    """The first step after which the ranks were seen with different parameters, if they had been seen with the same
    before. None if they never differed, if they differed from the start, or if the parameters were not recorded."""
    found: dict[tuple[int, int], dict[int, tuple[object, float]]] = defaultdict(dict)
    for one in run.history.executions.placed:
        if one.global_step is not None and one.parameters is not None and is_whole(one.parameters):
            found[one.attempt, one.global_step][one.rank] = one.parameters, one.mono_s
    if not found:  # then the states at saves and resumes may show it
        for state in states(run.beside_steps):
            step, sums = step_of(run.history, state.event), state.sums.get("parameters")
            if step is not None and sums:
                every = tuple(sorted((name, *entry) for name, entry in sums.items()))
                found[state.event.attempt or 0, step][state.event.rank or 0] = every, state.event.mono_s
    equal = 0
    for (attempt, step), ranks in sorted(found.items()):
        if len({parameters for parameters, _ in ranks.values()}) > 1:
            return Apart(step, attempt, max(at_s for _, at_s in ranks.values())) if equal else None
        equal += len(ranks) > 1
    return None
