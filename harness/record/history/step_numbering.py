"""Goes through the attempts in order and gives their steps global numbers. Pure.

An attempt has one or more segments. The first begins with the attempt. Another begins if a checkpoint is loaded between
two steps and training continues from it, or if the job returns to a state that it kept in memory. For each part of an
attempt between two such points, the base is found from what was seen in that part alone. Steps before a return were
only a warm-up if the attempt had loaded and saved nothing before them; a warm-up is left out of the history."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Literal

import numpy as np

from torchaos.harness.protocol.wire import Event
from torchaos.harness.record.checkpoint_names import checkpoint_of, main_first, number_in_name
from torchaos.harness.record.history.attempts import Attempt, Segment, at_step, by_place, jumps, may_begin
from torchaos.harness.record.history.first_steps import Scene, parts_of
from torchaos.harness.record.history.saves_and_loads import Load, Save, counts_steps, saved_as, whole_loads
from torchaos.harness.record.history.snapshots import Snapshots, segment_at
from torchaos.harness.record.history.step_evidence import LOSSES, OPTIMIZER, SAMPLES, SCHEDULER, Witness, decide
from torchaos.harness.record.history.step_witnesses import hear, log_begins_again, log_lead
from torchaos.harness.record.steps import Executions

# The trust that an attempt simply goes on at a place where it loads something, or where its state is recorded again;
# and the trust if, in addition, another state was seen, or none could be seen: without a load, and with one.
_RESTORED, _UNSEEN, _LOADED = 0.7, 0.2, 0.1
# The trust in the first attempt's own count, if no state is recorded: it decides for all later attempts whether their
# first steps count.
_OWN_COUNT = 1.2
_OF_RANKS = (OPTIMIZER, SAMPLES, LOSSES)
_MOST = 2**62  # a number in a name or a file that is larger is no step
Lines = list[tuple[float, int]]  # (mono_s, step)


@dataclass(frozen=True)
class _Returns:
    """The places where an attempt may have gone back, each given by the number of local steps before it."""

    places: Sequence[int]  # in order, with the start and the end of the attempt
    loads: Mapping[int, Sequence[Load]]
    again: Collection[int]  # where the state was recorded again
    other: Collection[int]  # places where that was the state of another step
    unseen: bool  # no state of the attempt was recorded

    def restored(self, place: int) -> bool:
        return place in self.loads or place in self.again

    def trust(self, place: int, alone: bool) -> float:
        """The trust that the attempt simply goes on there. `alone`: whether it is the first attempt."""
        if alone and self.unseen:
            return _OWN_COUNT
        if place in self.other or (not alone and (self.unseen or self.restored(place))):
            return _LOADED if place in self.loads else _UNSEEN
        return _RESTORED if self.restored(place) else 1.0


_EARLY = 4  # steps at the beginning of a job, which may only warm it up


@dataclass
class Placing:
    """Gives the steps of the attempts global numbers, one attempt after the other. Earlier attempts help to find the
    numbers of the next."""

    found: Sequence[Attempt]
    seen: Mapping[int, Executions]  # by attempt
    saves: Mapping[int, Sequence[Save]]  # by attempt
    loads: Sequence[Load]
    lines: Lines
    twin: Sequence[Executions]  # the final history of the twin
    # Whether the ranks of one attempt made different numbers of steps: some ended earlier, or did not keep together.
    uneven: Literal["", "at the end", "all the time"] = ""
    ahead: Mapping[int, Mapping[int, int]] = field(default_factory=dict)  # by attempt and rank: see Scene
    blind: Collection[int] = ()  # the numbers of attempts whose steps or saves may not have been seen
    snapshots: Snapshots = field(default_factory=Snapshots)
    peers: Sequence[Executions] = ()  # see Scene
    placed: list[Executions] = field(default_factory=list)
    saved: list[Save] = field(default_factory=list)
    foreign: Collection[str] = ()  # see Scene
    log_offset: int | None = None
    log_changed: bool = False  # the log counts in another way than before, or began again
    hits: Sequence[Event] = ()  # of faults
    hit_elsewhere_s: Sequence[float] = ()  # of faults that hit other replicas, CLOCK_MONOTONIC
    of_program: Collection[int] = ()  # global steps after which the twin's program put an older state back
    counted_on: set[int] = field(default_factory=set)  # the same of this run
    late_names: set[str] = field(default_factory=set)  # of checkpoints that are written later than the step in the name
    warm: set[int] = field(default_factory=set)  # by how many steps the first attempt warmed up
    went_on: set[int] = field(default_factory=set)  # local steps of the first attempt after which it may have gone back

    def place(self, attempt: Attempt) -> Attempt:
        """The attempt with the base of each of its segments. Attempts must come in order."""
        own, placed_before = self.seen[attempt.number], len(self.placed)
        returns = self._returns(attempt, own)
        segments = self._segments(attempt, own, returns)
        self.snapshots.add(attempt.number, segments, own[:0])
        first = segments[0]
        if first.base is not None and not any(self._earlier(attempt)) and (len(own) or attempt is self.found[0]):
            self.foreign = [] if first.base else [load.path for load in whole_loads(returns.loads.get(first.after, []))]
        self._calibrate(attempt)
        self.saved += self._placed_saves(attempt.number, segments)
        made = [steps_.placed.global_step for steps_ in self.placed[placed_before:]]
        placed = [int(step) for steps_ in made if len(steps_) for step in (steps_.min(), steps_.max())]
        return replace(
            attempt, base=first.base, witnesses=first.witnesses, conflicts=first.conflicts, loaded=first.loaded,
            first_step=min(placed, default=None), last_step=max(placed, default=None), segments=tuple(segments),
        )  # fmt: skip

    def _returns(self, attempt: Attempt, own: Executions) -> _Returns:
        loads = by_place((load for load in self.loads if load.attempt == attempt.number), own)
        last = int(own.local_step.max(initial=0))
        other, changed = self.snapshots.seen_again(attempt.number, own)
        begun, kept = self.snapshots.begun(attempt.number), self.snapshots.kept(attempt.number)
        unseen = not self.snapshots.has(attempt.number, own)
        jumped = jumps(own, unseen)
        again = other | ((begun | changed) - self._saved_at(attempt, own)) | (changed & jumped)
        again = {place for place in again if 0 < place < last}
        uncounted = unseen and np.isnan(own.column("opt_step")).all()
        elsewhere = parts_of(own, self._known(own)) if uncounted else set()
        places = [
            place for place in sorted((loads.keys() - {0}) | jumped | again | elsewhere)
            if place in again | elsewhere or place not in loads
            or may_begin(loads[place], at_step(own, place), at_step(own, place + 1), unseen)
        ]  # fmt: skip
        self.snapshots.put_back |= {(attempt.number, place) for place in {*loads} | other | (begun - kept)}
        return _Returns([0, *places, last], loads, again, other, unseen)

    def _saved_at(self, attempt: Attempt, own: Executions) -> set[int]:
        """The local steps after which the attempt saved. A rank that has ended its last step may still save with
        others."""
        last, ends = int(own.local_step.max(initial=0)), own.last_of("rank")
        end = dict(zip(ends.rank.tolist(), ends.local_step.tolist(), strict=True))
        return {
            save.local_step for save in self.saves.get(attempt.number, ())
            if any(end.get(rank, last) > save.local_step for rank in save.ranks)
        }  # fmt: skip

    def _segments(self, attempt: Attempt, own: Executions, returns: _Returns) -> list[Segment]:
        """The segments of the attempt. Gives its steps global numbers, and adds its states to the snapshots."""
        segments, placed_before, alone = list[Segment](), len(self.placed), attempt is self.found[0]
        for place, until in pairwise(returns.places):
            trust = returns.trust(place, alone)
            part = self._segment(attempt, segments, place, until, returns.loads.get(place, []), trust)
            straight = segments[-1].global_step(place) if segments else None
            goes_back = returns.unseen or returns.restored(place) or part.is_done_again(straight)
            warmed_up = self._only_warmed_up(segments, part)
            if goes_back and straight is not None and straight != part.base and not warmed_up:
                goes_back = not self._is_of_program(attempt, place, segments[0].base, straight)
            if goes_back and straight is not None and straight != part.base:
                logged_on = self._logged_on(attempt, segments[-1].after, place, until)
                goes_on = part.counts_on(straight, logged_on, warmed_up)
                goes_back = not goes_on
                if goes_on is None:
                    part = replace(part, base=None, conflicts=())
            if not segments or (goes_back and part.base != straight):
                if warmed_up:
                    self.warm |= {place} if alone else set()
                    del self.placed[placed_before:]
                    segments.clear()
                segments.append(part)
                self.snapshots.put_back.discard((attempt.number, place))
            elif alone:
                self.went_on.add(place)
            self._put(own, place, until, segments[-1])
            self.snapshots.add(attempt.number, segments, self.placed[-1], until)
        return segments

    def _segment(
        self, attempt: Attempt, before: Sequence[Segment], place: int, until: int, loads: Sequence[Load], trust: float
    ) -> Segment:
        """The segment that begins after `place` local steps, after the segments `before` of the same attempt, from what
        was seen up to the step `until`. `trust`: see Scene."""
        own = self.seen[attempt.number]
        step = own.local_step
        ends = [load.mono_s for load in loads] or own.at(step == place).mono_s.tolist()
        since_s = max(ends, default=attempt.started_s) if place else attempt.started_s
        until_s = float(own.at(step == until + 1).mono_s.min(initial=inf))
        made, blind = self._earlier(attempt)
        first = not (place or made or blind)
        scene = Scene(
            number=attempt.number,
            first=first,
            alone=attempt is self.found[0],
            own=own.at((step > place) & (step <= until)),
            ranks=own.ranks,
            after=place,
            straight=before[-1].global_step(place) if before else None,
            trust=trust,
            as_first=bool(before) and before[-1].after == 0 and place in self.went_on,
            loads=loads,
            lines=[line for line in self._lines_of(attempt) if since_s <= line[0] < until_s and not self.log_changed],
            saves=[
                *self.saved,
                *(save for save in self._placed_saves(attempt.number, before) if save.begun_s < since_s),
            ],
            blind=blind,
            saves_seen=any(self.saves.values()),
            known=self._known(own),
            unseen=not self.snapshots.has(attempt.number, own),
            snapshots=self.snapshots,
            peers=self.peers,
            log_offset=self.log_offset,
            foreign=() if first else self.foreign,
            ahead=self.ahead.get(attempt.number, {}),
        )
        witnesses = hear(scene)
        base, conflicts = decide(witnesses)
        if base is not None and (base >= _MOST or (self.uneven and not self._is_common(base, scene, witnesses))):
            base, conflicts = None, ()
        used = _used(whole_loads(loads), scene.saves, base)
        if used and base is not None:
            self._correct(used, base)
        return Segment(
            attempt.number, place, since_s, base, tuple(witnesses), conflicts, used.path if used else None,
            bool(place) and not loads,
        )  # fmt: skip

    def _logged_on(self, attempt: Attempt, before: int, place: int, until: int) -> bool | None:
        """Whether the step numbers in the log of the attempt go on after `place` local steps as they did between
        `before` and `place`. None if this is not known."""
        own, leads = self.seen[attempt.number], list[int | None]()
        starts = [own.at(own.local_step == step + 1).mono_s.min(initial=inf) for step in (before, place, until)]
        for since, to, (start_s, end_s) in zip((before, place), (place, until), pairwise(starts), strict=True):
            part = own.at((own.local_step > since) & (own.local_step <= to))
            lines = [line for line in self._lines_of(attempt) if start_s <= line[0] < end_s]
            leads.append(log_lead(lines, zip(part.mono_s.tolist(), part.local_step.tolist(), strict=True)))
        return None if None in leads else leads[0] == leads[1]

    def _is_common(self, base: int, scene: Scene, witnesses: Sequence[Witness]) -> bool:
        """Whether the step `base` holds for all ranks: no rank shows another step, the ranks make their steps together,
        and all of them made that step; or the first attempt simply goes on. The counter of a rank counts more than its
        samples, which may come again in each epoch."""
        counted = {
            rank for witness in witnesses if witness.name in (OPTIMIZER, SCHEDULER) and not witness.contradicts(base)
            for rank in witness.ranks
        }  # fmt: skip
        apart = [witness for witness in witnesses if set(witness.ranks) < scene.own.ranks]
        if any(each.name in _OF_RANKS and each.contradicts(base) and not {*each.ranks} <= counted for each in apart):
            return False
        if self.uneven != "at the end":
            return scene.alone and base == (scene.straight or 0)
        for known in reversed(scene.known):
            made = known.at(known.global_step == base)
            if len(made):
                last = int(made.attempt.max())
                return made.of_attempt(last).ranks >= scene.own.ranks & known.of_attempt(last).ranks
        return True

    def _known(self, own: Executions) -> list[Executions]:
        mine = [bool(part.attempts & own.attempts) for part in self.placed]
        earlier, here = (
            own.joined([part for part, is_mine in zip(self.placed, mine, strict=True) if is_mine is wanted]).placed
            for wanted in (False, True)
        )
        return [*self.twin, earlier, here]

    def _earlier(self, attempt: Attempt) -> tuple[bool, bool]:
        """Whether an earlier attempt made a step or a save; and whether steps or saves of an earlier attempt may not
        have been seen."""
        before = [earlier for earlier in self.found if earlier.number < attempt.number]
        made = any(len(self.seen[each.number]) or self.saves.get(each.number) for each in before)
        return made, any(
            each.number in self.blind or (not len(self.seen[each.number]) and self._lines_of(each)) for each in before
        )

    def _put(self, own: Executions, after: int, up_to: int, segment: Segment) -> None:
        part = own.at((after < own.local_step) & (own.local_step <= up_to))
        part.place(segment.base, segment.after)
        self.placed.append(part)

    def all_placed(self, seen: Executions) -> Executions:
        """All steps that have got global numbers, in order."""
        return seen.joined(self.placed)

    def _is_of_program(self, attempt: Attempt, place: int, began: int | None, straight: int) -> bool:
        """Whether putting back an older state after `place` local steps is a part of the program, as where the next
        phase, trial or fold begins. Then the steps count on. It is, if no fault had hit the attempt before, or if the
        twin does the same after the same global step (`straight`). It is not, if the steps before may have been only a
        warm-up: the first attempt made as many steps in its warm-up, or they are its first steps. `began`: the base of
        the attempt."""
        own = self.seen[attempt.number]
        since_s, until_s = attempt.started_s, float(own.at(own.local_step == place + 1).mono_s.min(initial=inf))
        times = [hit.mono_s for hit in self.hits if hit.attempt in (None, attempt.number)]
        hit = any(since_s <= at_s <= until_s for at_s in (*times, *self.hit_elsewhere_s))
        may_warm_up = place in self.warm or (place <= _EARLY and not began)
        if straight in self.of_program or not (hit or may_warm_up):
            self.counted_on.add(straight)
            return True
        return False

    def _only_warmed_up(self, before: Sequence[Segment], then: Segment) -> bool:
        """Whether the steps before `then` were only a warm-up: nothing was loaded or saved before them, and at `then`
        the job loads a checkpoint, or returns to the state with which it began."""
        if (
            len(before) != 1
            or before[0].loaded is not None
            or (then.in_memory and then.base not in (before[0].base, None))
        ):
            return False
        return all(save.begun_s > then.started_s for save in self.saves.get(then.number, ()))

    def _placed_saves(self, attempt: int, segments: Sequence[Segment]) -> list[Save]:
        return [self._placed_save(save, segments) for save in self.saves.get(attempt, ())] if segments else []

    def _placed_save(self, save: Save, segments: Sequence[Segment]) -> Save:
        part = segment_at(segments, save.local_step, save.begun_s)
        step, told = part.global_step(save.local_step), number_in_name(save.path)
        late = save.in_thread and step is not None and told is not None and 0 < told <= step
        late &= self.snapshots.has(save.attempt, self.seen[save.attempt]) or (
            self.log_offset is not None and self.log_offset > -2
        )
        if late and told is not None and self._counts_steps(save):
            return replace(save, global_step=told, begun_step=step)
        if step is not None and self._is_early(save, step, part):
            return replace(save, global_step=step + 1)
        return self._by_name(replace(save, global_step=step))

    def _is_early(self, save: Save, step: int, part: Segment) -> bool:
        """Whether ranks that make no steps saved this file early: the other ranks had not ended the step in its name
        yet, and saved their own file with this number after that step."""
        ranks, own = self.seen[save.attempt].ranks, _last_number(save.path)
        if ranks & set(save.ranks) or own != step + 1:
            return False
        others = (each for each in self.saves[save.attempt] if ranks & set(each.ranks))
        return any(_last_number(each.path) == own == part.global_step(each.local_step) for each in others)

    def _counts_steps(self, save: Save) -> bool:
        return counts_steps(save.path, self.saves.get(self.found[0].number, ()))

    def _correct(self, load: Load, base: int) -> None:
        """Corrects the step of a save that was loaded later. A job may write the state of an earlier step, in a thread
        or from a copy in memory; the load of the checkpoint shows which step that was. If no thread wrote it, the name
        must agree."""
        before = (save for save in reversed(self.saved) if save.begun_s < load.mono_s)
        parts = (save for save in before if checkpoint_of(save.path) == checkpoint_of(load.path))
        was = saved_as(load.path, self.saved, load.mono_s) or next(parts, None)
        if was is None or was.global_step is None or not 0 < base < was.global_step:
            return
        if not was.in_thread and not (number_in_name(was.path) == base and self._counts_steps(was)):
            return
        kept, step = checkpoint_of(was.path), was.global_step
        self.saved = [
            replace(save, global_step=base, begun_step=None)
            if save.global_step == step and checkpoint_of(save.path) == kept
            else save
            for save in self.saved
        ]
        if not was.in_thread:  # then all such files, of all ranks, have the state of the step in their name
            self.late_names.add(_unnumbered_checkpoint(was.path))
            self.saved = list(map(self._by_name, self.saved))

    def _by_name(self, save: Save) -> Save:
        """The save at the step in its name, if the job writes files of such names later than that step."""
        told, step = number_in_name(save.path), save.global_step
        if told is None or step is None or not 0 < told < step:
            return save
        is_late = _unnumbered_checkpoint(save.path) in self.late_names
        return replace(save, global_step=told, begun_step=None) if is_late else save

    def _lines_of(self, attempt: Attempt) -> Lines:
        later = [other_attempt.started_s for other_attempt in self.found if other_attempt.number > attempt.number]
        return [line for line in self.lines if attempt.started_s <= line[0] < min(later, default=float("inf"))]

    def _calibrate(self, attempt: Attempt) -> None:
        lines = self._lines_of(attempt)
        own = [part.placed for part in self.placed if len(part) and part[0].attempt == attempt.number] if lines else []
        steps = [step for part in own for step in zip(part.mono_s.tolist(), part.global_step.tolist(), strict=True)]
        lead = log_lead(lines, steps) if lines else None
        if lead is None and lines and attempt is self.found[0] and lines[0][1] in (0, 1):
            lead = lines[0][1] - 1  # no steps of it were seen, and its log begins with its first step
        if lead is not None:
            self.log_changed |= self.log_offset is not None and abs(lead - self.log_offset) > 1
            self.log_changed |= log_begins_again(lines, steps)
            self.log_offset = lead


def _unnumbered_checkpoint(path: str) -> str:
    """The path of the checkpoint that contains a file, without its numbers."""
    return re.sub(r"\d+", "#", checkpoint_of(path))


def _last_number(path: str) -> int | None:
    """The last number in the name of a file."""
    found = re.findall(r"\d+", posixpath.basename(path))
    return int(found[-1]) if found else None


def _used(loads: Sequence[Load], saves: Sequence[Save], base: int | None) -> Load | None:
    """The loaded checkpoint from which the job continued: the last one that was saved at the step `base` or, if there
    is none, the last one. Of several files, one that may hold the model."""
    made = [(load, saved_as(load.path, saves, load.mono_s)) for load in reversed(loads)]
    steps = {load.path: save.global_step for load, save in made if save and _may_hold(save, base)}
    fitting = [load for load, _save in made if load.path in steps] or [load for load, _save in made]
    return min(fitting, key=lambda load: (*main_first(load.path), steps.get(load.path) != base), default=None)


def _may_hold(save: Save, base: int | None) -> bool:
    """Whether a save may hold the state of the step `base`. A thread may write the state of an earlier step."""
    step = save.global_step
    return step is not None and base is not None and (step == base or (save.in_thread and 0 < base <= step))
