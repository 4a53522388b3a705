"""The witnesses of a job's base, which is the number of global steps before its first step, or before its next step
after a load. A job that comes back may start counting at any number, so its own count alone is not trusted. evidence.py
says what each kind of witness observes, and decides."""

from __future__ import annotations

import math
import posixpath
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from torchaos.harness.record.history import evidence as names
from torchaos.harness.record.history.alignment import FEW, align
from torchaos.harness.record.history.checkpoints import (
    Load,
    Save,
    checkpoint_of,
    number_in_contents,
    number_in_name,
    saved_as,
    whole_loads,
)
from torchaos.harness.record.history.evidence import Witness
from torchaos.harness.record.history.snapshots import Snapshots
from torchaos.harness.record.steps import Execution, Executions
from torchaos.harness.record.steps.execution import with_values
from torchaos.harness.record.steps.samples import sums_of

Array = npt.NDArray[Any]
Read = Callable[[Execution], float | None]
Said = tuple[tuple[int, ...], str]  # bases that fit; the fact that this is based on
Tell = Callable[[Load, Sequence[Save]], Said | None]
Equal = Callable[[Execution, Execution], bool]
_RECENT = 4  # values of a counter that must each belong to one step, so that it can be continued
_LATE = 1000  # the most steps by which a thread may write late
_OTHER_RANKS = 0.2  # the trust in the lesser part of the ranks
_FIRST_STATE = 0.2  # the trust in the state with which the job began
_UNKNOWN_FILE = 0.2  # the trust in a file that this run was not seen to save
_LOADED = 0.7  # the trust in that an attempt simply goes on, where it loads something
_FIRST_ONLY = 0.5  # the trust in losses if only the first agrees
_NEAR = 1e-4  # relative; losses that are farther apart are not equal but for rounding
_MOST_STARTS = 256  # steps that begin like an attempt


@dataclass(frozen=True)
class Scene:
    """The facts about an attempt, or about a point in it, from which its base is determined. Local steps are counted
    from that point."""

    number: int  # of the attempt
    first: bool  # no attempt before it made a step or a save
    alone: bool  # there was no attempt before it
    own: Executions  # up to the next point at which the job may have gone back
    loads: Sequence[Load]  # before its first step
    lines: Sequence[tuple[float, int]]  # (mono_s, step) of the job's log in this part
    saves: Sequence[Save]  # of earlier attempts, placed
    blind: bool  # the saves of some earlier attempt may not have been seen
    known: Sequence[Executions]  # of earlier attempts, and of the twin: placed
    log_offset: int  # by how much the log's count is usually ahead of ours
    snapshots: Snapshots = field(default_factory=Snapshots)  # of earlier attempts
    foreign: Mapping[str, int] = field(default_factory=dict)  # files of another run: the base of the first attempt
    after: int = 0  # steps of the attempt before that point
    straight: int | None = None  # the global step at that point, if the steps before simply go on
    put_back: bool = False  # a state was put back from memory there
    # By rank: by how much the optimizer's own counter is ahead of the training, if it was new in this attempt.
    ahead: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def start(self) -> list[Execution]:
        """The first steps, which show which state was restored."""
        first = self.own.at(self.own.local_step <= self.after + FEW)
        return [with_values(execution, {"local_step": execution.local_step - self.after}) for execution in first]

    def known_where(self, wanted: Callable[[Executions], Array]) -> list[Execution]:
        """The known steps for which `wanted` is true."""
        return [execution for steps in self.known for execution in steps.at(wanted(steps))]


def hear(scene: Scene) -> list[Witness]:
    """All witnesses of the base."""
    whole = whole_loads(scene.loads)
    ours = [load for load in whole if load.path not in scene.foreign]
    samples = _of_samples(scene)
    return [
        *_of_state(scene),
        *(_of_files(ours, scene) or _of_foreign(whole, scene)),
        *_of_counter(names.OPTIMIZER, scene, lambda execution: execution.opt_step, "opt_step", scene.ahead),
        *_of_counter(names.SCHEDULER, scene, lambda execution: execution.sched_step, "sched_step", None),
        *_of_content(names.RATES, scene, lambda execution: execution.lr or None, _first_rate),
        *samples,
        *_of_losses(scene, samples),
        *_of_log(scene),
        *_of_start(scene),
    ]


def _of_state(scene: Scene) -> list[Witness]:
    """The witness of the state itself. A process that begins with the first state may only have lost the weights."""
    found = scene.snapshots.began_with(scene.number, scene.after, scene.own)
    trust = _FIRST_STATE if found == (0,) and scene.straight is None else 1.0
    rests_on = "to the bit, its parameters were those after that step"
    return [_open(names.STATE, found, rests_on, trust=trust)] if found else []


def _of_start(scene: Scene) -> list[Witness]:
    if scene.straight is not None:
        trust = _LOADED if scene.loads or scene.put_back else 1.0
        return [Witness(names.STRAIGHT, scene.straight, "the attempt was at this step before", trust=trust)]
    if scene.first and (scene.alone or (_log_lead(scene) or 0) <= scene.log_offset + 1):
        return [Witness(names.START, 0, "it is the first attempt with steps")]
    nothing = not scene.blind and not scene.saves and not scene.loads
    return [Witness(names.UNSAVED, 0, "no attempt before it saved a checkpoint")] if nothing else []


def _open(name: str, fits: Sequence[int], rests_on: str, ranks: Sequence[int] = (), trust: float = 1.0) -> Witness:
    """A witness that prefers none of the steps that fit, unless only one fits."""
    only = len(fits) == 1
    return Witness(name, fits[0] if only else None, rests_on, () if only else tuple(fits), tuple(ranks), trust)


def _grouped(name: str, by_rank: Mapping[int, Said], trust: float = 1.0) -> list[Witness]:
    """A witness for each group of ranks that agree, the largest group first. The others are trusted less, so that some
    ranks that have another state do not make the step of all unknown."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(by_rank):
        groups[by_rank[rank][0]].append(rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    return [
        _open(name, fits, by_rank[ranks[0]][1], ranks, trust if not place else trust * _OTHER_RANKS)
        for place, (fits, ranks) in enumerate(ordered)
    ]


def _of_files(loads: Sequence[Load], scene: Scene) -> list[Witness]:
    """The witnesses of the checkpoints that were loaded. A rank that loaded several may have gone on from any."""
    saved_here = [load for load in loads if saved_as(load.path, scene.saves, load.mono_s)]
    trust = 1.0 if saved_here else _UNKNOWN_FILE
    return [
        replace(witness, trust=witness.trust * trust)
        for name, tell in ((names.RECORD, _save_record), (names.CONTENTS, _contents), (names.NAME, _name))
        for witness in _of_loads(name, saved_here or loads, scene.saves, tell)
    ]


def _of_loads(name: str, loads: Sequence[Load], saves: Sequence[Save], tell: Tell) -> list[Witness]:
    """A checkpoint that was loaded and says nothing silences the others: the job may have gone on from that one."""
    said: dict[int, dict[str, list[Said]]] = defaultdict(lambda: defaultdict(list))  # by rank and checkpoint
    for load in reversed(loads):
        if load.ok:
            known = tell(load, saves)
            said[load.rank][_set_of_files(load.path)] += [known] if known else []
    by_rank = {
        rank: [each for known in of_checkpoint.values() for each in known]
        for rank, of_checkpoint in said.items() if all(of_checkpoint.values())
    }  # fmt: skip
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for rank in sorted(by_rank):
        groups[tuple(dict.fromkeys(fits for fits, _rests_on in by_rank[rank]))].append(rank)
    found = list[Witness]()
    for fits, ranks in sorted(groups.items(), key=lambda item: (-len(item[1]), item[1])):
        trust, rests_on = _OTHER_RANKS if found else 1.0, by_rank[ranks[0]][0][1]
        found.append(
            _open(name, tuple(dict.fromkeys(step for of_one in fits for step in of_one)), rests_on, ranks, trust)
        )
    return found


def _set_of_files(path: str) -> str:
    """The checkpoint to which a file belongs: by the step in its path, or else its folder."""
    own = checkpoint_of(path)
    return own if number_in_name(own) is not None else posixpath.dirname(own)


def _of_foreign(loads: Sequence[Load], scene: Scene) -> list[Witness]:
    """The witness of files that the first attempt loaded too, before anything of this run was saved."""
    bases = sorted({scene.foreign[load.path] for load in loads if load.path in scene.foreign})
    return [_open(names.FOREIGN, bases, "the first attempt loaded this file too, and began there")] if bases else []


def _save_record(load: Load, saves: Sequence[Save]) -> Said | None:
    save = saved_as(load.path, saves, load.mono_s)
    if save is None or save.global_step is None:
        return None
    rests_on = f"{save.path} was saved after step {save.global_step}, in attempt {save.attempt}"
    before = range(save.global_step - 1, max(0, save.global_step - _LATE), -1) if save.in_thread else ()
    return (save.global_step, *before), rests_on


def _contents(load: Load, saves: Sequence[Save]) -> Said | None:
    found = number_in_contents(load.numbers)
    if found is None or found[1] < 0:
        return None
    key, number = found
    # Some jobs count steps from 0, and those that warm up count otherwise than we do.
    fits = sorted({number - ahead + from_zero for ahead in (0, _ahead(saves) or 0) for from_zero in (0, 1)})
    return tuple(fits), f"{load.path} holds {key} = {number}"


def _name(load: Load, saves: Sequence[Save]) -> Said | None:
    number, ahead = number_in_name(load.path), _ahead(saves)
    if number is None or (ahead is None and any(_named(saves))):
        return None  # it counts something else: saves, epochs
    base = number - (ahead or 0)
    return (base, base + 1) if ahead is None else (base,), f"it is called {load.path}"


def _ahead(saves: Sequence[Save]) -> int | None:
    """By how much the numbers in the names of saves are ahead of their steps. None if these numbers are no steps."""
    named = _named(saves)
    ahead = {number - done for number, done in named}
    plain = len(named) > 1 or ahead <= {-1, 0, 1}
    return ahead.pop() if len(ahead) == 1 and plain else None


def _named(saves: Sequence[Save]) -> set[tuple[int, int]]:
    named = ((number_in_name(save.path), save.global_step) for save in saves)
    return {(number, done) for number, done in named if number is not None and done is not None}


class _Known:
    """The global steps after which a counter had each of its values."""

    def __init__(self, known: Sequence[Executions], column: str) -> None:
        self._values = np.concatenate([np.zeros(0), *(executions.column(column) for executions in known)])
        self._steps = np.concatenate([np.zeros(0, np.int64), *(executions.global_step for executions in known)])
        seen = ~np.isnan(self._values)
        self._values, self._steps = self._values[seen], self._steps[seen]
        self._found: dict[float, set[int]] = {}

    def at(self, value: float) -> set[int]:
        if value not in self._found:
            self._found[value] = set(np.unique(self._steps[self._values == value]).tolist())
        return self._found[value]

    def __bool__(self) -> bool:
        return len(self._values) > 0

    @property
    def first(self) -> float:
        return float(self._values.min())

    @property
    def last(self) -> float:
        return float(self._values.max())


def _of_counter(
    name: str, scene: Scene, read: Read, column: str, ahead: Mapping[int, int] | None
) -> list[Witness]:  # fmt: skip
    """The witness of a counter. `ahead`: see Scene; None if it is not known with what the counter begins."""
    if not any(read(execution) is not None for execution in scene.start):
        return []
    known = _Known(scene.known, column)
    by_rank: dict[int, Said] = {}
    for execution in sorted(scene.start, key=lambda execution: -execution.local_step):
        value = read(execution)
        if value is not None:
            lead = None if ahead is None else ahead.get(execution.rank, 0)
            bases = sorted(step - execution.local_step for step in _steps_at(value, known, lead))
            fits = tuple(base for base in bases if base >= 0)
            by_rank[execution.rank] = (
                fits,
                f"it stood at {value:g} when the attempt's step {execution.local_step} was over",
            )
    return _grouped(name, {rank: fitting for rank, fitting in by_rank.items() if fitting[0]})


def _steps_at(value: float, known: _Known, lead: int | None) -> set[int]:
    """The global steps after which the counter has the value `value`: as observed earlier, or computed if the counter
    counts steps. `lead`: by how much the counter is ahead of the steps; None if not known."""
    if seen := known.at(value):
        return seen
    if not math.isfinite(value):  # from a damaged record
        return set()
    if not known or value < known.first:
        return set() if lead is None else {int(value) - lead}
    last = known.last
    if value < last or any(
        len(known.at(last - before)) != 1 for before in range(min(_RECENT, int(last - known.first) + 1))
    ):
        return set()
    return {max(known.at(last)) + int(value - last)}


def _union(parts: Iterable[Hashable]) -> Hashable:
    return tuple(sorted(str(leaf) for part in parts if isinstance(part, tuple) for leaf in part))


def _first_loss(steps: Executions) -> Array:
    return _first_of(steps.column("losses"))


def _first_rate(steps: Executions) -> Array:
    return _first_of(steps.column("lr"))


def _first_of(values: Array) -> Array:
    return values[:, 0] if values.shape[1] else np.full(len(values), np.nan)


def _of_samples(scene: Scene) -> list[Witness]:
    """The witness of the samples. They are aligned rank by rank or, if the earlier ranks no longer exist, by the
    samples of all ranks of a step together."""
    by_sum = any(steps.column("summed").any() for steps in (scene.own, *scene.known))
    read, column = (_sum, "samples_sum") if by_sum else (_seen_samples, "samples")
    found = _of_content(names.SAMPLES, scene, read, lambda steps: steps.column(column))
    if found:
        return found
    own = _union_by_step(scene.start, lambda execution: execution.local_step, by_sum)
    if not own:
        return []
    begun = scene.own.at(scene.own.local_step == scene.after + min(own)).column("samples_sum")
    near = _around(_steps_with(scene.known, begun.sum(dtype=np.uint64)), [min(own)])
    last = {
        (execution.rank, execution.global_step): execution
        for execution in scene.known_where(lambda steps: np.isin(steps.global_step, near))
    }
    fits = align(own, {step: [key] for step, key in _union_by_step(last.values(), _global, by_sum).items()})
    if fits:
        return _grouped(names.SAMPLES, {-1: (fits, "taken over all ranks of a step")})
    other = _unlike(scene, _straight(scene), scene.start[:1], lambda ours, theirs: read(ours) == read(theirs))
    return [Witness(names.SAMPLES, None, "they are not those of that step", against=other)] if other else []


def _straight(scene: Scene) -> set[int]:
    return set() if scene.straight is None else {scene.straight}


def _seen_samples(execution: Execution) -> Hashable:
    return execution.samples if execution.samples_seen else None


def _sum(execution: Execution) -> Hashable:
    """The number of samples and their sum, which are also known of steps whose single samples were not kept."""
    return sums_of(execution)[:2] if execution.samples_seen or execution.sums is not None else None


def _of_content(
    name: str, scene: Scene, read: Callable[[Execution], Hashable], key_of: Callable[[Executions], Array],
    only_first: bool = False,
) -> list[Witness]:  # fmt: skip
    """The witness of the contents of steps, such as losses, aligned rank by rank. `key_of`: a number for each step;
    only steps with equal numbers may be equal. `only_first`: only the first step of each rank is compared."""
    own: dict[int, dict[int, Hashable]] = defaultdict(dict)
    for execution in scene.start:
        if (key := read(execution)) is not None and not (only_first and own[execution.rank]):
            own[execution.rank][execution.local_step] = key
    if not own:
        return []
    firsts = {min(seen) for seen in own.values()}
    begun = scene.own.at(np.isin(scene.own.local_step - scene.after, list(firsts)))
    keys = np.unique(key_of(begun))
    starts = {int(step) for part in scene.known for step in np.unique(part.at(np.isin(key_of(part), keys)).global_step)}
    if len(starts) > _MOST_STARTS:
        return []  # a constant shows nothing
    near = _around(starts, firsts)
    reference: dict[int, dict[int, list[Hashable]]] = {rank: defaultdict(list) for rank in own}
    for execution in scene.known_where(lambda steps: np.isin(steps.global_step, near)):
        if execution.rank in own and execution.global_step is not None and (key := read(execution)) is not None:
            reference[execution.rank][execution.global_step].append(key)
    by_rank: dict[int, Said] = {}
    for rank, seen in own.items():
        if fits := align(seen, reference[rank]):
            by_rank[rank] = fits, f"those of its step {min(seen)} are those of step {fits[0] + min(seen)}"
    found = _grouped(name, by_rank, _FIRST_ONLY if only_first else 1.0)
    last = max((step for part in scene.known for step in part.global_step[-1:].tolist()), default=0)
    return [replace(witness, beyond=last) if len(witness.fits) > 1 else witness for witness in found]


def _of_losses(scene: Scene, samples: Sequence[Witness]) -> list[Witness]:
    """The witness of the losses. If they are those of no earlier steps, the first loss alone may be: then later ones
    differ by rounding, or part from the earlier ones, because other state was lost or another state was put in
    unseen. If not even the first loss is known: the steps with the same samples and other losses."""

    def read(execution: Execution) -> Hashable:
        return execution.losses if execution.loss_seen else None

    if found := _of_content(names.LOSSES, scene, read, _first_loss):
        return found
    if found := _of_content(names.LOSSES, scene, read, _first_loss, only_first=True):
        parted = _unlike(scene, {step for witness in found for step in witness.fits}, scene.start)
        against = Witness(names.PARTED, None, "the first loss is equal, and later ones are not", against=parted)
        return [against] if parted else found
    own = {execution.rank: execution for execution in reversed(scene.start) if execution.loss_seen}
    unlike = _unlike(scene, {step for witness in samples for step in witness.fits} | _straight(scene), own.values())
    return [Witness(names.UNLIKE, None, "the same samples gave other losses", against=unlike)] if unlike else []


def _unlike(
    scene: Scene, bases: Collection[int], own: Collection[Execution], equal: Equal | None = None
) -> tuple[int, ...]:  # fmt: skip
    """Those of the bases from which a step of `own` would be a known step that was another: with other losses, or as
    `equal` says."""
    equal = equal or (lambda ours, theirs: _are_near(ours.losses, theirs.losses))
    due = {base + execution.local_step for base in bases for execution in own}
    if not due or len(due) > _MOST_STARTS:
        return ()
    known: dict[tuple[int | None, int], list[Execution]] = defaultdict(list)
    there = scene.known_where(lambda steps: np.isin(steps.global_step, list(due)))
    if {execution.rank for execution in there} != scene.own.ranks:
        return ()  # another number of ranks shares the data out in another way
    for execution in there:
        known[execution.global_step, execution.rank].append(execution)
    return tuple(
        base for base in sorted(bases)
        if any(
            (theirs := known.get((base + mine.local_step, mine.rank))) and not any(equal(mine, each) for each in theirs)
            for mine in own
        )
    )  # fmt: skip


def _are_near(ours: Sequence[float | None], theirs: Sequence[float | None]) -> bool:
    """Whether the losses differ by rounding at most. Losses that were not seen do not differ."""
    pairs = zip(ours, theirs, strict=False)
    return all(a is None or b is None or math.isclose(a, b, rel_tol=_NEAR) for a, b in pairs)


def _around(steps: Iterable[int], firsts: Iterable[int]) -> list[int]:
    """The global steps of the first steps of an attempt, if one of `firsts` (local steps) is one of `steps`."""
    return [step - first + local for step in set(steps) for first in firsts for local in range(1, FEW + 1)]


def _steps_with(known: Sequence[Executions], samples_sum: np.uint64) -> list[int]:
    """The global steps in which the last executions of all ranks together had these samples."""
    step, rank, sums = (
        np.concatenate([np.zeros(0, kind), *(executions.column(name) for executions in known)])
        for name, kind in (("global_step", np.int64), ("rank", np.int64), ("samples_sum", np.uint64))
    )
    order = np.lexsort((rank, step))
    last = np.append((np.diff(step[order]) != 0) | (np.diff(rank[order]) != 0), True)[: len(order)]
    kept = order[last]
    steps, starts = np.unique(step[kept], return_index=True)
    if not len(steps):
        return []
    found: list[int] = steps[np.add.reduceat(sums[kept], starts) == samples_sum].tolist()
    return found


def _union_by_step(
    executions: Iterable[Execution], step_of: Callable[[Execution], int], by_sum: bool
) -> dict[int, Hashable]:
    """By step: the samples of all ranks together, or their sum. Steps with samples that were not seen are left out."""
    read, union = (_sum, _total) if by_sum else (_seen_samples, _union)
    parts: dict[int, list[Any]] = defaultdict(list)
    for execution in executions:
        parts[step_of(execution)].append(read(execution))
    return {step: union(found) for step, found in parts.items() if None not in found}


def _total(sums: Sequence[tuple[int, int]]) -> Hashable:
    return sum(count for count, _ in sums), sum(part for _, part in sums) % 2**64


def _global(execution: Execution) -> int:
    return execution.global_step or 0


def _of_log(scene: Scene) -> list[Witness]:
    """The witness of the log. A log line may come before or after the end of its step in the journal, so it may be off
    by one."""
    ahead = _log_lead(scene)
    if ahead is None or ahead < scene.log_offset:
        return []
    base = ahead - scene.log_offset
    near = tuple(candidate for candidate in (base - 1, base + 1) if candidate >= 0)
    return [
        Witness(names.LOG, base, f"its step numbers are {base} ahead of those of the attempt", near if base else ())
    ]


def _log_lead(scene: Scene) -> int | None:
    own = zip(scene.own.mono_s.tolist(), (scene.own.local_step - scene.after).tolist(), strict=True)
    return log_lead(scene.lines, own) if scene.lines else None


def log_lead(lines: Iterable[tuple[float, int]], steps: Iterable[tuple[float, int]]) -> int | None:
    """By how much the step numbers in the log are usually ahead of the given steps. Both are (mono_s, step)."""
    done = sorted(steps)
    times = [at for at, _step in done]
    highest = list(accumulate((step for _at, step in done), max))
    leads = Counter(number - highest[bisect_right(times, at) - 1] for at, number in lines if times and times[0] <= at)
    return leads.most_common(1)[0][0] if leads else None
