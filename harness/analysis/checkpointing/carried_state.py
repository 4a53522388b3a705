"""Did a resume restore the state? The state with which an attempt began is compared with the state with which the job
went on after its save or, if the job died before that, with the state that was saved.

The state is compared by name (restored_state.py). In a run without such a record, the check sums of all parameters and
of all moments are compared. No twin is needed, and the number of ranks may change: the check sums
(protocol/check_sums.py) add up over the ranks that share the parameters, so the sum of eight ranks before a resume can
be compared with the sum of six ranks after it.

A state may also be mixed from two steps: the job went on from the step that the loaded file claims, with that step's
data or counters, but its weights are those after another step. A thread that writes the live tensors while the training
goes on leaves such a file, and so does a copy that is made too late."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from torchaos.harness.analysis.checkpointing.recorded_states import after_step
from torchaos.harness.analysis.checkpointing.restored_state import Begun, begun_with
from torchaos.harness.analysis.checkpointing.saved_parameters import ParameterSums
from torchaos.harness.analysis.checkpointing.state_differences import MOMENTS, TRAINED, Other, in_words, of_optimizer
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.tolerance import LOSS, ROUNDING
from torchaos.harness.protocol.check_sums import is_of_nothing, is_whole, over_all, plain
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.checkpoint_names import main_first, number_in_name
from torchaos.harness.record.history import Attempt, Execution, History, Save, Segment
from torchaos.harness.record.history.step_evidence import (
    CONTENTS,
    LOG,
    NAME,
    OPTIMIZER,
    RATES,
    RECORD,
    SAMPLES,
    SCHEDULER,
    STATE,
)
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Executions

_OF_OPTIMIZER = "moments of the optimizer"
_RESTORED = {"parameters": "restored", "moments": "restored_moments"}


@dataclass(frozen=True)
class Carried:
    """Whether a resume restored each part of the state. None: this was not seen."""

    attempt: Attempt  # the attempt that resumed
    saver: Attempt  # the last earlier attempt that did the step from which `attempt` resumed
    parameters: bool | None
    moments: bool | None
    frozen: bool | None = None
    buffers: bool | None = None
    others: tuple[Other, ...] = ()  # the parts of the state that are not as they were
    after: Mapping[str, int] = field(default_factory=dict)  # by name of a lost part: the step from which its values are
    moved: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # see `_of_other_ranks`
    no_moments: bool = False  # no moments were seen, before the resume and after it
    all_trained: bool = False  # `frozen` ones are trained too, by the optimizer of another rank, or of a plain class
    after_forward: bool = False  # the buffers were read after the first forward, which may write into them
    trained: str = ""  # which other parameters are trained than before
    generators: str = ""  # changed generators that the forward draws from: what was seen of them

    @property
    def step(self) -> int:
        return self.attempt.base or 0

    @property
    def resized(self) -> bool:
        return self.attempt.world_size != self.saver.world_size

    @property
    def lost(self) -> list[str]:
        return [name for name, equal in self._restored if equal is False]

    @property
    def kept(self) -> list[str]:
        """The names of the parts of the state that were restored, such as "parameters" or "buffers". The optimizer's
        moments are left out if none were seen."""
        return [name for name, equal in self._restored if equal and not (self.no_moments and name == _OF_OPTIMIZER)]

    @property
    def _restored(self) -> list[tuple[str, bool | None]]:
        parameters, frozen = self.parameters, self.frozen
        if self.all_trained and frozen is not None:
            parameters, frozen = (False if frozen is False else parameters), None
        return [
            ("parameters", parameters), ("frozen parameters", frozen), ("buffers", self.buffers),
            (f"{of_optimizer(self.others)} of the optimizer", self.moments),
        ]  # fmt: skip

    def instead(self, *names: str) -> str:
        """A clause: what these parts of the state ("parameters", "moments") hold instead of the right values."""
        moved = {rank: of for name in names for rank, of in self.moved.get(name, {}).items()}
        if moved:
            return "; ".join(f"on rank {rank} they {said('of a rank', rank=of)}" for rank, of in sorted(moved.items()))
        of = {self.after[name] for name in names if name in self.after}
        return f"they {after_step(of.pop(), self.step)}" if len(of) == 1 else said("sums other")

    @property
    def in_words(self) -> str:
        return f"the resume from step {self.step} in attempt {self.attempt.number}{self.sizes}"

    @property
    def sizes(self) -> str:
        """The numbers of ranks, if they changed."""
        then, now = (counted(one.world_size, "rank") for one in (self.saver, self.attempt))
        return f" (then {then}, now {now})" if self.resized else ""


def carried_into(run: Record, attempt: int, after: int = 0) -> Carried | None:
    """What an attempt restored when it began; with `after`: when its segment after that many steps began. None if it
    resumed from no step of this run."""
    found = (carried for carried in resumes_carried(run) if carried.attempt.segments[0].after == after)
    return next((carried for carried in found if carried.attempt.number == attempt), None)


def _parts(run: Record) -> list[Attempt]:
    """The attempts in order, each segment as an attempt of its own."""
    lives = {attempt.number: attempt for attempt in run.history.attempts}
    return [
        replace(lives[part.number], base=part.base, started_s=part.started_s, segments=(part,))
        for part in run.history.segments
    ]


def _resumes(run: Record, part: Segment) -> bool:
    """Whether the segment is a resume: it began with an attempt, or because the job went back to an earlier state after
    a fault (it loaded a checkpoint, or at once put back what it had kept in memory). Without a fault, going back may be
    part of the program."""
    if run.history.begins_attempt(part):
        return True
    if part.in_memory:
        return _is_at_once(run, part)
    hits = run.of_kind(Kind.APPLYING)
    return any(hit.attempt == part.number and hit.mono_s < part.started_s for hit in hits)


def _is_at_once(run: Record, part: Segment) -> bool:
    """Whether the job went back as the first thing after a fault, before a further step of the rank that was hit. For a
    state that was kept in memory, the time of going back is not seen, only that it was before the end of the next
    step."""
    steps = run.history.executions.of_attempt(part.number)
    first_s = run.history.of_segment(part.number, part.after).first_s()
    until = first_s if part.in_memory and first_s is not None else part.started_s
    for hit in run.of_kind(Kind.APPLYING):
        own = steps.at((steps.rank == hit.rank) & (hit.mono_s < steps.mono_s) & (steps.mono_s < until))
        if hit.attempt == part.number and hit.mono_s < until and not len(own):
            return True
    return False


def resumes_carried(run: Record) -> Iterator[Carried]:
    """Yields a `Carried` for each resume from a step that this run had done, in order: with a new attempt, or within an
    attempt that loaded a checkpoint again after a fault. If steps came between the fault and that load, it counts as a
    resume only if it restored everything."""
    for carried in _resumes_carried(run):
        part = carried.attempt.segments[0]
        doubtful = carried.lost or carried.parameters is None or carried.moments is None
        if run.history.begins_attempt(part) or not doubtful or _is_at_once(run, part):
            yield carried


def _resumes_carried(run: Record) -> Iterator[Carried]:
    history, sums = run.history, ParameterSums(run)
    for place, attempt in enumerate(parts := _parts(run)):
        if not attempt.base or not _resumes(run, attempt.segments[0]):
            continue
        first = _of(history, attempt, attempt.base + 1)
        before = [earlier for earlier in parts[:place] if _of(history, earlier, attempt.base)]
        if not first or not before:
            continue
        saver = before[-1]
        saved = _of(history, saver, attempt.base)
        if _by_all(history, attempt, first) and _by_all(history, saver, saved):
            yield _Compared(run, sums, attempt, saver, first, saved).carried()
        else:
            yield Carried(attempt, saver, None, None)


class _Compared:
    """The state before a resume and after it. `first`: the first step after the resume; `saved`: the step from which
    the job resumed, as the attempt `saver` made it; both of all ranks."""

    def __init__(
        self, run: Record, sums: ParameterSums, attempt: Attempt, saver: Attempt, first: Sequence[Execution],
        saved: Sequence[Execution],
    ) -> None:  # fmt: skip
        self._sums, self._attempt, self._saver, self._first, self._saved = sums, attempt, saver, first, saved
        self._base = attempt.base or 0
        self._next = _of(run.history, saver, self._base + 1)  # what the saver did after its save, if it did anything
        self._earlier = run.history.of_segment(saver.number, saver.segments[0].after)
        self._same = _same(first, self._next)
        self._begun = begun_with(run, attempt.number, self._base, attempt.started_s)
        self._begun.others = [other for other in self._begun.others if not self._is_harmless(other)]
        self._moved = {} if self._same else _of_other_ranks(first, saved, self._next, self._begun.in_place)
        self._of = {
            name: _step_with(run.history, attempt, _by_rank(first, _RESTORED[name]), name) for name in _RESTORED
        }

    def carried(self) -> Carried:
        begun, attempt = self._begun, self._attempt
        parameters, moments = self._restored("parameters"), self._restored(MOMENTS)
        lost = [name for name, equal in (("parameters", parameters), ("moments", moments)) if equal is False]
        frozen_names = {name for quantity, name in begun.compared if quantity == "frozen"}
        return Carried(
            attempt, self._saver, parameters, moments, begun.equal("frozen"), begun.equal("buffers"),
            others=tuple(self._with_step(other) for other in begun.of("parameters", "frozen", "buffers", MOMENTS)),
            after={name: step for name in lost if (step := self._of[name]) is not None},
            moved=self._moved,
            no_moments=not begun.seen.get(MOMENTS) and all(map(is_of_nothing, self._sums_of_moments())),
            all_trained=frozen_names <= begun.trained,
            after_forward=begun.after_forward,
            trained=in_words(begun.of(TRAINED), attempt.world_size),
            generators=begun.generators_in_words(begun.lost_generators, attempt.world_size),
        )  # fmt: skip

    def _with_step(self, other: Other) -> Other:
        """Completes a part of which the step is not known: the check sum of all parts may show the step."""
        step = self._of.get(other.quantity)
        known = step is not None and step != self._base and other.holds == said("others")
        return replace(other, holds=after_step(step, self._base)) if known and step is not None else other

    def _is_harmless(self, other: Other) -> bool:
        """Whether a part that changed is no state, because it had no effect on the next step."""
        unused = other.name in self._begun.unsaved and not _differ(self._first, self._next)
        return unused or (self._same and _is_scratch(other, self._begun))

    def _restored(self, name: str) -> bool | None:
        """Whether the parameters, or the moments, were restored: shown by the next step, by name, or by their check
        sums. None: it was not seen."""
        equal = self._begun.equal(name)
        if self._same:
            return name == "parameters" or equal is not False
        if equal is None:
            equal = self._by_sums(name)
        equal = _rank_by_rank(name, equal, self._moved, self._begun, self._first, self._saved)
        return False if equal is None and self._of[name] not in (None, self._base) else equal

    def _by_sums(self, name: str) -> bool | None:
        restored, after = _by_rank(self._first, _RESTORED[name]), _by_rank(self._saved, name)
        if name == MOMENTS:
            went_on = _by_rank(self._next, "restored_moments")
            return _equal(restored, went_on if went_on and None not in went_on.values() else after)
        equal = _equal(restored, _of_all(_by_rank(self._next, "restored"), after))
        if equal is None:
            saved = self._sums.total_at(self._base)
            equal = _are_those_of_the_save(restored, saved) or _equal(restored, after)
            if equal is False and saved is None and changes_weights_between_steps(self._earlier):
                return None
        return equal

    def _sums_of_moments(self) -> list[str | None]:
        return [*(one.moments for one in self._saved), *(one.restored_moments for one in self._first)]


def changes_weights_between_steps(steps: Executions) -> bool:
    """Whether a step is seen to have begun with other parameters than those after the step before: the job clips or
    averages them in between, so the check sums after a step are not those that it saves."""
    seen = list(steps.with_state)
    after = {(one.attempt, one.rank, one.local_step): one.parameters for one in seen}
    before = ((one.restored, after.get((one.attempt, one.rank, one.local_step - 1))) for one in seen)
    return any(None not in pair and pair[0] != pair[1] for pair in before)


def _step_with(history: History, attempt: Attempt, restored: Mapping[int, str | None], name: str) -> int | None:
    """The last step before this resume after which each rank had those values of `name` with which it began this
    attempt. None if it is not known, or if there are no values: the optimizers of plain classes have no sums."""
    if None in restored.values() or all(map(is_of_nothing, restored.values())):
        return None
    steps = history.before_segment(attempt.number, attempt.segments[0].after)
    earlier = steps.at(np.isin(steps.rank, list(restored))).placed
    after: dict[int, dict[int, str | None]] = {}
    for one in earlier.with_state:
        after.setdefault(one.global_step or 0, {})[one.rank] = getattr(one, name)
    return max((step for step, of in after.items() if of == restored), default=None)


def _of_other_ranks(
    first: Sequence[Execution], saved: Sequence[Execution], next_: Sequence[Execution], in_place: bool
) -> dict[str, dict[int, int]]:
    """Finds ranks that began with the state of another rank instead of their own. By quantity: such a rank and the
    other rank. Empty if all ranks may only have changed places (not `in_place`), or if their number changed."""
    found: dict[str, dict[int, int]] = {}
    for name, restored in _RESTORED.items():
        now, before, continued = _by_rank(first, restored), _by_rank(saved, name), _by_rank(next_, restored)
        if now.keys() != before.keys() or None in now.values() or None in before.values():
            return {}
        # What a rank went on with after the save is often seen only on the ranks that save.
        changed = any(own not in (None, before.get(rank)) for rank, own in continued.items())
        if changed and None in (continued.get(rank) for rank in before):
            continue
        had = {rank: {before[rank], continued.get(rank)} - {None} for rank in before}
        found[name] = {
            rank: others[0]
            for rank, sums in now.items()
            if sums not in had[rank] and str(sums).rpartition("-")[2].strip("0")
            if (others := [other for other in had if sums in had[other] and before[other] != before[rank]])
        }
    places = [sorted(of.items()) for of in found.values()]
    if not in_place and all(one == places[0] and sorted(dict(one)) == sorted(dict(one).values()) for one in places):
        return {}
    return found


def _rank_by_rank(
    name: str, equal: bool | None, moved: Mapping[str, Mapping[int, int]], begun: Begun, first: Sequence[Execution],
    saved: Sequence[Execution],
) -> bool | None:  # fmt: skip
    """Whether each rank got its own part back. `equal`: whether the parts that were compared by name are equal. A part
    that only one rank holds may have been recorded as a check sum alone."""
    if moved.get(name):
        return False
    now, before = _by_rank(first, _RESTORED[name]), _by_rank(saved, name)
    if equal and now.keys() == before.keys() and any(now[rank] != before[rank] for rank in begun.partly[name]):
        return None
    return equal


def _is_scratch(other: Other, begun: Begun) -> bool:
    """Whether this part of the state had no effect: the step led to the same parameters and moments. An example is what
    an optimizer keeps only during a step (SAM). Always False for an optimizer of a plain class, because its parameters
    were not compared."""
    return other.quantity in ("parameters", MOMENTS) and other.of in begun.parameters


def _differ(ours: Sequence[Execution], theirs: Sequence[Execution]) -> bool:
    """Whether the losses of a step were seen and differ by more than rounding. A buffer in no state_dict may be a cache
    or a statistic; it is state only if it acts on the loss."""
    of = {execution.rank: execution for execution in theirs}
    pairs = [(one, of[one.rank]) for one in ours if one.rank in of]
    return any(LOSS.apart(LOSS.read(one), LOSS.read(other), 0.0) > ROUNDING for one, other in pairs)


def _same(ours: Sequence[Execution], theirs: Sequence[Execution]) -> bool:
    """Whether a step had the same result in both attempts. Then both began the step with the same state. This is also
    true if the job changes its parameters between a step and the save, a change that no check sum shows."""
    names = ("parameters", "moments")
    pairs = [(_by_rank(ours, name), _by_rank(theirs, name)) for name in names]
    return all(mine == other and None not in mine.values() for mine, other in pairs)


def _are_those_of_the_save(restored: Mapping[int, str | None], saved: int | None) -> bool:
    """Whether the resume restored the parameters that the job had when its save began. They differ from the parameters
    after the step if the job changes parameters in between, for example clips them."""
    total = over_all(list(restored.values()))
    return saved is not None and total is not None and is_whole(total) and plain(total) == saved


def _of_all(continued: Mapping[int, str | None], after: Mapping[int, str | None]) -> Mapping[int, str | None]:
    """The parameters with which the earlier attempt continued after the save. They differ from those `after` the step
    if the job changes parameters before it saves. The agent reads them again only on the ranks that save. If all ranks
    have the same parameters, the values of one rank are used for all."""
    seen = set(continued.values()) - {None}
    if None in continued.values() and len(seen) == 1 and len(set(after.values())) == 1:
        return dict.fromkeys(after, seen.pop())
    return continued


def _of(history: History, attempt: Attempt, step: int) -> list[Execution]:
    steps = history.of_segment(attempt.number, attempt.segments[0].after)
    return list(steps.at(steps.global_step == step))


def _by_all(history: History, attempt: Attempt, done: Sequence[Execution]) -> bool:
    """Whether all ranks of the attempt made a step (`done`). Ranks that make no steps in the whole run, such as actors
    and writers, do not count."""
    trains = history.executions.ranks
    return {rank for rank in range(attempt.world_size) if rank in trains} == {execution.rank for execution in done}


def _by_rank(executions: Sequence[Execution], name: str) -> dict[int, str | None]:
    return {execution.rank: getattr(execution, name) for execution in executions}


def _equal(ours: Mapping[int, str | None], theirs: Mapping[int, str | None]) -> bool | None:
    """Compares the sums over all ranks. If the sums can't be added up: True if each rank has the same sum as before;
    False if all ranks held the same whole tensors before, and do not now; otherwise None."""
    mine, other = over_all(list(ours.values())), over_all(list(theirs.values()))
    if mine is None and other is not None and all(sum_ and is_whole(sum_) for sum_ in (*ours.values(), other)):
        return False
    if mine is None or other is None:
        return True if ours == theirs and None not in ours.values() else None
    return mine == other


_NUMBER = re.compile(r"\d+")
_FILE, _GOES_ON = (CONTENTS, NAME, RECORD), (SAMPLES, LOG, OPTIMIZER, SCHEDULER, RATES)


def _step_by_name(saves: Sequence[Save], name: str) -> set[int]:
    """The step in the name of a checkpoint, if in the names of all other saves the number differs from the step by the
    same amount. Otherwise empty."""
    told = number_in_name(name)
    ahead = {
        number - save.global_step for save in saves
        if (number := number_in_name(save.path)) is not None and number != told
        if save.global_step is not None and not save.in_thread
    }  # fmt: skip
    return {told - lead for lead in ahead} if told is not None and len(ahead) == 1 else set()


def mixed_state(history: History, part: Segment) -> str:
    """If a segment began with a state mixed from two steps: a clause that says so. Otherwise, or if there is no proof:
    empty. Proof: the recorded state is of one step; what the job did next is of another step, and the checkpoint file
    also claims that other step. If the file does not, both the optimizer's counter and the samples must show it."""
    base, said_by = part.base, part.witnesses
    loaded = [posixpath.basename(load.path) for load in history.loads if load.attempt == part.number and load.ok]
    if base is None or not loaded or not any(one.name == STATE and base in one.fits for one in said_by):
        return ""
    # A thread may write late: then the record of a save fits many steps, and claims none. Rates that stay equal claim
    # none either.
    of_file = [set(one.fits) for one in said_by if one.name in _FILE and (one.name != RECORD or len(one.fits) == 1)]
    name = min(reversed(loaded), key=main_first)
    claims = [fits for fits in of_file if fits] or [set(map(int, _NUMBER.findall(name)))]
    own = [set(one.fits) for one in said_by if one.name in (CONTENTS, NAME) and one.fits]
    if sure := _step_by_name(history.saves, name).intersection(*own):
        claims = [sure]
    goes_on = {
        one.name: set(one.fits)
        for one in said_by
        if one.name in _GOES_ON and len(one.fits) == 1 and base not in one.fits
    }
    both = set.intersection(*claims) & set().union(*goes_on.values()) - {0}
    if len(both) == 1 and (number_in_name(name) in both or not any(base in fits for fits in claims)):
        step = both.pop()
        late = ": they were written, or copied, while the training went on" if base > step else ""
        return said("torn", name=name, step=step, weights=base, late=late)
    counted = goes_on.get(OPTIMIZER, set()) & goes_on.get(SAMPLES, set()) - {0}
    names = " and then ".join(dict.fromkeys(loaded))
    return said("mixed", weights=base, step=counted.pop(), names=names) if len(counted) == 1 else ""
