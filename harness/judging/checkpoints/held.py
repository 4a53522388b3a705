"""Whether a checkpoint holds the parameters that this very run had at the step that it claims. Pure.

A twin does not show it: it makes the same mistake. What shows it are check sums of the parameters, taken as each save
began (kept.py), and the same sums of the tensors in the checkpoints (checkpoints/sketch.py).

A tensor is a parameter's where it has its name, its type and its shape. Many tensors look so and rightly hold something
else: an average, a target network, the best model so far. So
- only what the job resumes from is judged, and no tensor whose name or path speaks of such a thing;
- a parameter is right where any tensor of its name does hold it, in this file or another one of the same step and use;
- the checkpoint itself must say of which step it is, and nothing else than what was seen of its save: a copy may be
  written a step late.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torchaos.harness.agent.check_sums import MODULUS
from torchaos.harness.contracts import Finding, First, What, failed
from torchaos.harness.judging.checkpoints.contents import Checkpoint, checkpoints_of, root_of
from torchaos.harness.judging.checkpoints.kept import Kept, Values
from torchaos.harness.judging.checkpoints.pairing import family
from torchaos.harness.judging.checkpoints.points import points_of
from torchaos.harness.record.record import Record

_ASIDE = re.compile(
    r"(?<![a-z])(?:ema|averag|avg|swa|polyak|teacher|target|shadow|slow|best|anchor|prev|(?:ref|old|init)(?![a-z]))",
    re.I,
)


@dataclass(frozen=True)
class Wrong:
    """A checkpoint that holds something else than the parameters of its step."""

    checkpoint: Checkpoint
    names: tuple[str, ...]  # of the parameters, in order
    what: str  # what it does
    of_step: int | None = None  # whose parameters it holds, where that is known

    @property
    def in_words(self) -> str:
        more = len(self.names) - 1
        others = f" and {more} others" if more > 1 else " and one other" if more else ""
        return f"{self.checkpoint.at} is whole, and {self.what}: {self.names[0]}{others}"


@dataclass(frozen=True)
class _Entry:
    """A tensor that has a parameter's name."""

    name: str  # the parameter's
    sum: int
    values: Values  # of the parameter, after the checkpoint's step
    whole: bool  # it has its type and shape too
    aside: bool  # it says that it is something else

    @property
    def right(self) -> bool:
        return self.sum in self.values.whole or any(self.sum in part for part in self.values.parts.values())


class Held:
    def __init__(self, run: Record) -> None:
        self._kept, self._points, self._root = Kept(run), points_of(run), root_of(run)
        listed = run.artifacts.get("inventory", {}).get("checkpoints") or []
        self._raw = {str(raw["path"]): raw for raw in listed}
        self._known: dict[str, list[_Entry]] = {}
        self._good = [one for one in checkpoints_of(run) or [] if one.good and self._kept.steps]

    @cached_property
    def wrong(self) -> Wrong | None:
        """The first checkpoint that is."""
        return next((found for one in self._good for found in self._of(one)), None)

    @property
    def finding(self) -> Finding | None:
        if self.wrong is None:
            return None
        one, names = self.wrong.checkpoint, self.wrong.names
        first = First(What.SAVED, one.step or 0)
        return failed(
            self.wrong.in_words, first, step=one.step, checkpoint=one.path, entry=names[0], entries=len(names)
        )

    @cached_property
    def right(self) -> int:
        """How many checkpoints hold parameters of their step, as this run had them."""
        return sum(any(entry.right for entry in self._entries(one)) for one in self._good)

    def _of(self, one: Checkpoint) -> Iterator[Wrong]:
        told = self._raw[one.path].get("step")
        if one.step is None or told is None or not self._points.has(self._path(one)):
            return
        own, others = self._entries(one), [other for other in self._good if other.step == one.step and other is not one]
        alike = [entry for other in others if self._same_use(one, other) for entry in self._entries(other)]
        any_other = [entry for other in others for entry in self._entries(other)]
        off = _less_right([entry for entry in own if entry.whole and not entry.aside], [*own, *alike])
        yield from self._stale(one, told, off)
        if told == one.step:
            off = _less_right(off, any_other)
            yield from self._exchanged(one, off)
            yield from self._unknown(one, own, off)
            yield from self._doubled(one, own)
            yield from self._lacking(one, own)

    def _stale(self, one: Checkpoint, told: int, off: Iterable[_Entry]) -> Iterator[Wrong]:
        for step in reversed(self._kept.steps):
            of_step = self._kept.at(step)
            names = [entry.name for entry in off if entry.name in of_step and entry.sum in of_step[entry.name].whole]
            if names and step not in (one.step, told):
                what = f"holds the parameters of step {step}, not those of step {one.step}"
                yield Wrong(one, _each_once(names), what, step)

    def _exchanged(self, one: Checkpoint, off: Iterable[_Entry]) -> Iterator[Wrong]:
        there = self._kept.at(one.step or 0)
        for entry in off:
            for other, values in there.items():
                if other != entry.name and values.kind == entry.values.kind and entry.sum in values.whole:
                    yield Wrong(one, (entry.name,), f"holds {other} in place of another parameter")

    def _unknown(self, one: Checkpoint, own: Iterable[_Entry], off: Iterable[_Entry]) -> Iterator[Wrong]:
        """Where none of its parameters is right, only if a resume shows what it is for: an average may be all that a
        job ships."""
        names = _each_once(entry.name for entry in off if entry.values.sure)
        if names and (self._points.kinds or any(entry.right for entry in own)):
            yield Wrong(one, names, f"holds parameters of no step that was seen, where those of step {one.step} belong")

    def _doubled(self, one: Checkpoint, own: list[_Entry]) -> Iterator[Wrong]:
        """Each rank's part of a parameter is there, but for those that are another rank's."""
        for name, values in self._kept.at(one.step or 0).items():
            there = [entry.sum for entry in own if entry.name == name and not entry.whole]
            parts = values.parts
            gone = [rank for rank, found in parts.items() if not found.intersection(there)]
            known = set[int]().union(*parts.values())
            if gone and values.sure and len(there) == len(parts) and known.issuperset(there):
                yield Wrong(one, (name,), f"holds another rank's part twice, and not that of rank {gone[0]}")

    def _lacking(self, one: Checkpoint, own: list[_Entry]) -> Iterator[Wrong]:
        """What all others of its kind hold, and it has nothing of that name, though it has other parameters."""
        kin = [other for other in self._good if other is not one and family(other.path) == family(one.path)]
        always = [{entry.name for entry in self._entries(other) if entry.right} for other in kin]
        if always and any(entry.right for entry in own):
            there = {entry.name for entry in own if not entry.aside}
            gone = set.intersection(*always) & self._kept.at(one.step or 0).keys() - there
            if gone:
                yield Wrong(one, tuple(sorted(gone)), "lacks the parameter that the others of its kind hold")

    def _entries(self, one: Checkpoint) -> list[_Entry]:
        if one.path not in self._known:
            self._known[one.path] = self._found(one)
        return self._known[one.path]

    def _found(self, one: Checkpoint) -> list[_Entry]:
        kinds = self._raw[one.path].get("kinds")
        kinds = kinds if isinstance(kinds, Mapping) else {}
        found = []
        for tensor, sketch in one.sketches.items():
            name = self._kept.parameter_of(one.step or 0, tensor) if tensor in kinds and one.step is not None else None
            if name is not None and sketch:
                values = self._kept.at(one.step or 0)[name]
                around = f"{one.path}:{tensor.removesuffix(name)}"
                whole = kinds[tensor] == values.kind
                found.append(_Entry(name, int(sketch[0]) % MODULUS, values, whole, bool(_ASIDE.search(around))))
        return found

    def _same_use(self, one: Checkpoint, other: Checkpoint) -> bool:
        return not self._points.kinds or self._points.has(self._path(other))

    def _path(self, one: Checkpoint) -> str:
        return posixpath.join(self._root, one.path)


def _less_right(off: Iterable[_Entry], among: Iterable[_Entry]) -> list[_Entry]:
    right = {entry.name for entry in among if entry.right}
    return [entry for entry in off if entry.name not in right and entry.values.whole]


def _each_once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
