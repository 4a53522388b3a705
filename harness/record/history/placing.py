"""Goes through the attempts in order and gives their steps global numbers. Pure.

An attempt has one or more segments. The first begins with the attempt. Another begins if a checkpoint is loaded between
two steps and training continues from it, or if the job returns to a state that it kept in memory. Steps before such a
load were only a warm-up if the attempt had loaded and saved nothing before them. A warm-up is left out of the
history."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchaos.harness.record.history.attempts import Attempt
from torchaos.harness.record.history.believing import decide, goes_on_from, is_done_again_from
from torchaos.harness.record.history.checkpoints import (  # fmt: skip
    Load,
    Save,
    checkpoint_of,
    number_in_name,
    saved_as,
    says_step,
    whole_loads,
)
from torchaos.harness.record.history.segments import BySteps, Segment, by_place, goings_back, may_begin
from torchaos.harness.record.history.witnesses import Scene, hear, log_lead
from torchaos.harness.record.steps import Executions

_MOST = 2**62  # a number in a name or a file that is larger is no step
Lines = list[tuple[float, int]]  # (mono_s, step)


@dataclass
class Placing:
    """Places the attempts one after the other: gives their steps global numbers. Attempts that are placed already help
    to place the next."""

    found: Sequence[Attempt]
    seen: Mapping[int, Executions]  # by attempt
    saves: Mapping[int, Sequence[Save]]  # by attempt
    loads: Sequence[Load]
    lines: Lines
    twin: Sequence[Executions]  # the final history of the twin
    uneven: Collection[int] = ()  # the numbers of steps that the ranks of one attempt made, if they differ
    ahead: Mapping[int, Mapping[int, int]] = field(default_factory=dict)  # by attempt and rank: see Scene
    blind: Collection[int] = ()  # the numbers of attempts whose steps or saves may not have been seen
    placed: list[Executions] = field(default_factory=list)
    saved: list[Save] = field(default_factory=list)
    foreign: dict[str, int] = field(default_factory=dict)  # files of another run: the base of the first attempt
    log_offset: int = 0

    def place(self, attempt: Attempt) -> Attempt:
        """The attempt with the base of each of its segments. Attempts must come in order."""
        own = self.seen[attempt.number]
        loads = by_place((load for load in self.loads if load.attempt == attempt.number), own)
        segments = [self._segment(attempt, [], 0, loads.get(0, []))]
        is_first = attempt is self.found[0] or (len(own) > 0 and self._is_first(attempt))
        if is_first and segments[0].base is not None:
            told = [load.path for load in whole_loads(loads.get(0, []))]
            self.foreign = dict.fromkeys(told, segments[0].base) if segments[0].base == 0 else {}
        steps, done, placed_before = BySteps(own), 0, len(self.placed)
        for place in sorted((loads.keys() - {0}) | set(goings_back(steps))):
            here = loads.get(place, [])
            if here and not may_begin(here, steps[place], steps[place + 1]):
                continue
            self._put(own, done, place, segments[-1])
            done = place
            segment, straight_on = self._segment(attempt, segments, place, here), segments[-1].global_step(place)
            goes_on = goes_on_from if here else is_done_again_from
            if goes_on(segment.base, segment.witnesses, straight_on):
                if here and len(segments) == 1 and self._only_warmed_up(segments[0], segment):
                    del self.placed[placed_before:]
                    segments.clear()
                segments.append(segment)
        self._put(own, done, int(own.local_step.max(initial=0)), segments[-1])
        self._calibrate(attempt)
        self.saved += self._placed_saves(attempt.number, segments)
        made = [placed_part.placed.global_step for placed_part in self.placed[placed_before:]]
        placed = [int(step) for steps_ in made if len(steps_) for step in (steps_.min(), steps_.max())]
        first = segments[0]
        return replace(
            attempt, base=first.base, witnesses=first.witnesses, conflicts=first.conflicts, loaded=first.loaded,
            first_step=min(placed, default=None), last_step=max(placed, default=None), segments=tuple(segments),
        )  # fmt: skip

    def _segment(self, attempt: Attempt, before: Sequence[Segment], place: int, loads: Sequence[Load]) -> Segment:
        """The segment that begins after `place` local steps, after the segments `before` of the same attempt."""
        own = self.seen[attempt.number]
        ends = [load.mono_s for load in loads] or own.at(own.local_step == place).mono_s.tolist()
        since_s = max(ends, default=attempt.started_s) if place else attempt.started_s
        later = own.at(own.local_step > place) if place else own
        first = not place and self._is_first(attempt)
        scene = Scene(
            first=first,
            alone=attempt is self.found[0],
            own=later,
            after=place,
            loads=loads,
            lines=[line for line in self._lines_of(attempt) if line[0] >= since_s],
            saves=[*self.saved, *self._placed_saves(attempt.number, before)],
            known=[*self.twin, *(part.placed for part in self.placed)],
            log_offset=self.log_offset,
            foreign={} if first else self.foreign,
            ahead=self.ahead.get(attempt.number, {}),
        )
        witnesses = hear(scene)
        base, conflicts = decide(witnesses)
        if base is not None and base >= _MOST:
            base, conflicts = None, ()
        if self.uneven and attempt is not self.found[0]:
            base, conflicts = None, ()
        whole = whole_loads(loads)
        used = _used(whole, scene.saves, base)
        if used and base is not None:
            self._correct(used, base)
        return Segment(
            attempt.number, place, since_s, base, tuple(witnesses), conflicts, used.path if used else None,
            bool(place) and not loads,
        )  # fmt: skip

    def _is_first(self, attempt: Attempt) -> bool:
        """Whether no attempt before it made a step or a save, as far as agents and the log could see."""
        before = [earlier for earlier in self.found if earlier.number < attempt.number]
        return not any(
            len(self.seen[earlier.number]) or self.saves.get(earlier.number) or earlier.number in self.blind
            or self._lines_of(earlier) for earlier in before
        )  # fmt: skip

    def _put(self, own: Executions, after: int, up_to: int, segment: Segment) -> None:
        part = own.at((after < own.local_step) & (own.local_step <= up_to))
        part.place(segment.base, segment.after)
        self.placed.append(part)

    def all_placed(self, seen: Executions) -> Executions:
        """All steps that were placed, in order."""
        return seen.joined(self.placed)

    def _only_warmed_up(self, first: Segment, then: Segment) -> bool:
        saves = self.saves.get(first.number, ())
        return first.loaded is None and all(save.begun_s > then.started_s for save in saves)

    def _placed_saves(self, attempt: int, segments: Sequence[Segment]) -> list[Save]:
        return [self._placed_save(save, segments) for save in self.saves.get(attempt, ())] if segments else []

    def _placed_save(self, save: Save, segments: Sequence[Segment]) -> Save:
        own = [
            segment for segment in segments if (segment.after, segment.started_s) < (save.local_step, save.begun_s)
        ] or segments[:1]
        step, told = own[-1].global_step(save.local_step), number_in_name(save.path)
        if save.in_thread and step is not None and told is not None and 0 < told <= step and self._counts_steps(save):
            step = told
        return replace(save, global_step=step)

    def _counts_steps(self, save: Save) -> bool:
        """Whether the number in the name of a save is a step."""
        first = self.saves.get(self.found[0].number, ())
        return says_step(save.path) or any(
            number_in_name(first_save.path) == first_save.local_step for first_save in first
        )

    def _correct(self, load: Load, base: int) -> None:
        """Corrects the step of a save after its load. A job may write the state of an earlier step, in a thread or from
        a copy in memory. The load of the checkpoint shows which step that was. Without a thread, the name must
        agree."""
        was = saved_as(load.path, self.saved, load.mono_s)
        if was is None or was.global_step is None or was.global_step <= base:
            return
        if not was.in_thread and not (number_in_name(was.path) == base and self._counts_steps(was)):
            return
        kept, step = checkpoint_of(was.path), was.global_step
        self.saved = [
            replace(save, global_step=base) if save.global_step == step and checkpoint_of(save.path) == kept else save
            for save in self.saved
        ]

    def _lines_of(self, attempt: Attempt) -> Lines:
        later = [other_attempt.started_s for other_attempt in self.found if other_attempt.number > attempt.number]
        return [line for line in self.lines if attempt.started_s <= line[0] < min(later, default=float("inf"))]

    def _calibrate(self, attempt: Attempt) -> None:
        lines = self._lines_of(attempt)
        own = [part.placed for part in self.placed if len(part) and part[0].attempt == attempt.number] if lines else []
        steps = [step for part in own for step in zip(part.mono_s.tolist(), part.global_step.tolist(), strict=True)]
        lead = log_lead(lines, steps) if lines else None
        if lead is not None:
            self.log_offset = lead


def _used(loads: Sequence[Load], saves: Sequence[Save], base: int | None) -> Load | None:
    """The loaded checkpoint from which the job continued: the last one that was saved at the step `base`. If there is
    none, the last one."""
    made = [(load, saved_as(load.path, saves, load.mono_s)) for load in loads]
    fitting = [load for load, save in made if save is not None and save.global_step == base]
    return next(reversed(fitting or list(loads)), None)
