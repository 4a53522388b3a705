"""The model that finds the step from which a job went on: its base, the number of global steps before its first step.

A job's state has parts: the weights, the optimizer, the schedule, the data, the files and the log. A restart may put
each part back to another step. A *witness* observes one part, and says which steps fit. Each kind of witness has a
weight: how unlikely it is that the witness is wrong. The base is the step that contradicts the least weight. So the
order in which witnesses are heard does not matter, and no single witness outweighs all others.

Three facts keep the model honest:

- Witnesses of one group are wrong together (as when a file was loaded only to be looked at). So of each group, only the
heaviest contradicted witness counts.

- A part that stands at its beginning may only show that it was not restored. All such parts count as one light group.
But if a process goes back between two of its steps, each counter at its beginning counts by itself.

- "At another step" is always a possible answer, too. It contradicts every witness. If it is not clearly worse than the
best step, or if another step is not, the base is not known.

A witness that disagrees with the base stays visible: it is evidence that its part of the state was not restored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from torchaos.harness.record.plan import numbered

STATE, LOSSES = "the state itself", "the losses"
PARTED, UNLIKE = "the later losses", "the losses of the same samples"
OPTIMIZER, SCHEDULER, RATES = "the optimizer's own step counter", "the LR scheduler's counter", "the learning rates"
MOMENTS, RNG = "the optimizer's moments", "the random number generators"
RECORD, CONTENTS = "the loaded checkpoint", "the contents of the loaded checkpoint"
NAME, FOREIGN = "the name of the loaded checkpoint", "the file of another run"
SAMPLES, LOG = "the samples", "the job's log"
START, UNSAVED, STRAIGHT = "the start", "what had been saved", "the steps before"


class Kind(NamedTuple):
    """A kind of witness. `doubt`: how it can be wrong."""

    group: str
    weight: float
    doubt: str


KINDS: Mapping[str, Kind] = {
    STATE: Kind("state", 8.0, "two steps had the same parameters to the bit"),
    LOSSES: Kind("losses", 8.0, "two steps had the same losses to the bit"),
    OPTIMIZER: Kind("optimizer", 4.5, "the counter was not restored, or was saved before or after the weights"),
    MOMENTS: Kind("moments", 4.0, "they were saved before or after the weights"),
    RNG: Kind("random numbers", 1.5, "they were restored from another step than the weights"),
    RECORD: Kind("file", 4.5, "the file was loaded for something else, or holds the state of an earlier step"),
    CONTENTS: Kind("file", 4.0, "as above, or the number counts something else"),
    NAME: Kind("file", 2.4, "as above, or the number counts something else"),
    FOREIGN: Kind("file", 2.4, "the file is loaded at each start, whatever the job goes on from"),
    STRAIGHT: Kind("straight on", 3.5, "the job put an earlier state back"),
    START: Kind("start", 3.0, "the job went on from a state that was not seen"),
    UNSAVED: Kind("start", 0.7, "the job saved in a way that was not seen"),
    SCHEDULER: Kind("schedule", 2.0, "the schedule was not restored"),
    RATES: Kind("schedule", 0.9, "the schedule was not restored"),
    LOG: Kind("log", 1.9, "the job counts in another way"),
    SAMPLES: Kind("samples", 0.9, "the position in the data was not restored"),
    PARTED: Kind("optimizer", 2.5, "the optimizer's state was not restored"),
    UNLIKE: Kind("state", 0.8, "other state, such as that of the random numbers, was not restored"),
}
_MARGIN = 1.0  # the least weight between an answer and the next best one
_ANEW = "anew"  # the group of all parts that stand at their beginning
_COUNTERS = frozenset({OPTIMIZER, SCHEDULER, RATES})
_PARTS = _COUNTERS | {LOG, SAMPLES, MOMENTS, RNG}  # these begin at zero if nothing restores them
_ANEW_WEIGHT = 0.9
_ASSUMED = frozenset({START, UNSAVED, STRAIGHT})  # what is taken to be so unless something else is seen
_MANY = 64  # the most steps that a witness names; if more fit, it names only its preferred one
_ELSEWHERE = 2**63  # larger than any step


@dataclass(frozen=True)
class Witness:
    """The statement of one witness about the steps before the first step."""

    name: str  # of its kind, see KINDS
    fits: tuple[int, ...]
    rests_on: str  # the observation, for messages
    ranks: tuple[int, ...] = ()
    trust: float = 1.0  # the share of its kind's weight that it has
    prefers_first: bool = False  # the first step that fits is the most likely one
    against: Sequence[int] = ()  # steps that do not fit, if these are all that it knows
    beyond: float = inf  # from this step on, any step fits, because what the witness saw comes again and again

    @property
    def value(self) -> int | None:
        """The step that the witness prefers. None if several fit equally well."""
        return self.fits[0] if len(self.fits) == 1 or (self.fits and self.prefers_first) else None

    @cached_property
    def _fitting(self) -> frozenset[int]:
        return frozenset(self.fits)

    def contradicts(self, base: int) -> bool:
        if self.against:
            return base in self.against
        return base not in self._fitting and not base >= self.beyond

    @property
    def weight(self) -> float:
        return (_ANEW_WEIGHT if self._begins_anew else KINDS[self.name].weight) * self.trust

    @property
    def group(self) -> str:
        return _ANEW if self._begins_anew else KINDS[self.name].group

    @property
    def _begins_anew(self) -> bool:
        return self.name in _PARTS and self._fitting == {0}


def decide(witnesses: Sequence[Witness]) -> tuple[int | None, tuple[str, ...]]:
    """The base, and a sentence for each witness that disagrees with it. The base is None if it is not known; it is
    never guessed."""
    heard = [witness for witness in witnesses if witness.fits or witness.against]
    candidates = {fit for witness in heard if len(witness.fits) <= _MANY for fit in witness.fits}
    candidates |= {witness.value for witness in heard if witness.value is not None}
    costs = {base: _cost(base, heard) for base in (*candidates, _ELSEWHERE)}
    least = min(costs.values())
    near = {base for base, cost in costs.items() if cost < least + _MARGIN}
    base = near.pop() if len(near) == 1 else _preferred({base: costs[base] for base in near}, heard)
    if base in (None, _ELSEWHERE):
        return None, ()
    return base, tuple(_disagrees(witness, base) for witness in _against(base, heard))


def _against(base: int, witnesses: Sequence[Witness]) -> list[Witness]:
    """The witnesses that the base contradicts; of each group, only those of the heaviest kind. At the start of a run,
    loaded files are no witnesses, because they come from other runs."""
    at_start = any(witness.name == START and not witness.contradicts(base) for witness in witnesses)
    found = [
        witness for witness in witnesses
        if witness.fits and witness.contradicts(base) and witness.name not in _ASSUMED
        and not (at_start and witness.group == "file")
    ]  # fmt: skip
    heaviest = {KINDS[each.name].group: each.name for each in sorted(found, key=lambda each: KINDS[each.name].weight)}
    return [witness for witness in found if heaviest[KINDS[witness.name].group] == witness.name]


def _cost(base: int, witnesses: Sequence[Witness]) -> float:
    """The weight of all witnesses that the base contradicts."""
    heaviest: dict[str, float] = defaultdict(float)
    straight = {fit for witness in witnesses if witness.name == STRAIGHT for fit in witness.fits}
    lost = any(witness.name in (OPTIMIZER, MOMENTS) and witness.group == _ANEW for witness in witnesses)
    for witness in witnesses:
        if lost and witness.name == PARTED:
            continue  # this is why the later losses are others
        if witness.contradicts(base):
            group = KINDS[witness.name].group if straight and witness.name in _COUNTERS else witness.group
            if witness.name == MOMENTS and straight.issuperset(witness.fits):
                group = KINDS[OPTIMIZER].group  # an optimizer that was not put back keeps its counter as well
            heaviest[group] = max(heaviest[group], witness.weight)
    return sum(heaviest.values())


def _preferred(near: Mapping[int, float], witnesses: Sequence[Witness]) -> int | None:
    """Chooses between steps that are about equally good. Takes the step that a witness prefers, if this step
    contradicts no more weight than any of `near`, and if none of `near` contradicts the witness. Of several such
    witnesses, the heaviest decides. None if there is none. `near`: each step, with the weight that it contradicts."""
    least = min(near.values())
    for witness in sorted(witnesses, key=lambda witness: -witness.weight):
        preferred = None if witness.value is None else near.get(witness.value)
        if preferred == least and not any(witness.contradicts(base) for base in near):
            return witness.value
    return None


def _disagrees(witness: Witness, base: int) -> str:
    said = " or ".join(str(fit) for fit in witness.fits[:3])
    steps = "step was" if said == "1" else "steps were"
    where = f" on {numbered('rank', witness.ranks)}" if witness.ranks else ""
    return f"by {witness.name}{where}, {said} {steps} done, not {base}: {witness.rests_on}"
