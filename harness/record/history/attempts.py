"""The attempts of a run (the process of each rank, its times, and how each attempt ended), and their segments:
consecutive steps from the start of the attempt, or from a point at which the job went back to an earlier state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import number_in_name
from torchaos.harness.record.history.saves_and_loads import Load, number_in_contents
from torchaos.harness.record.history.step_evidence import (
    KINDS,
    LOG,
    LOSSES,
    MOMENTS,
    OPTIMIZER,
    RNG,
    SAMPLES,
    SCHEDULER,
    STATE,
    Witness,
)
from torchaos.harness.record.steps import Execution, Executions


@dataclass(frozen=True)
class Segment:
    """Steps that are counted from the same base. Most attempts have one segment."""

    number: int  # number of the attempt
    after: int  # steps of the attempt before the segment
    started_s: float  # CLOCK_MONOTONIC
    base: int | None  # global steps before its first step; None: not known
    witnesses: tuple[Witness, ...] = ()
    conflicts: tuple[str, ...] = ()
    loaded: str | None = None
    in_memory: bool = False  # it continues from a state that the job kept in memory, without a file

    def is_done_again(self, straight: int | None) -> bool:
        """Whether what the job computes in the segment shows that it went back, instead of going on from the step
        `straight`. A counter alone does not show it: several optimizers may take turns, or an optimizer was made
        anew."""
        trained = [witness for witness in self.witnesses if witness.name in (STATE, SAMPLES, LOSSES) and witness.fits]
        return self.base is not None and any(
            not witness.contradicts(self.base) and (straight is None or witness.contradicts(straight))
            for witness in trained
        )

    def counts_on(self, straight: int, logged_on: bool | None, warmed_up: bool) -> bool | None:
        """Whether only the model was put back in the segment, while the training goes on from the step `straight`. The
        counters, the job's log (which counts most) and the position in the data show this. `logged_on`: whether the
        step numbers in the log go straight on; None: not known. `warmed_up`: whether the segment before may only have
        been a warm-up; if then a single witness speaks for it, the answer is None (not known), because one part of the
        state may just not have been restored."""
        of_log = KINDS[LOSSES].weight
        on, back = defaultdict[str, float](float), defaultdict[str, float](float)  # by group, the heaviest witness
        if logged_on is not None:
            (on if logged_on else back)[LOG] = of_log
        for witness in self.witnesses:
            kind = KINDS[OPTIMIZER if witness.name == MOMENTS else witness.name]  # one load puts both back
            if witness.name == LOG and logged_on is None and straight not in witness.fits and self.base in witness.fits:
                back[LOG] = of_log  # the first lines in the attempt, of a job that does not log its warm-up
            if witness.name in (OPTIMIZER, MOMENTS, RNG, SCHEDULER, SAMPLES, LOSSES) and witness.fits:
                if straight in witness.fits:
                    on[kind.group] = max(on[kind.group], kind.weight)
                elif self.base is None or self.base in witness.fits:
                    back[kind.group] = max(back[kind.group], kind.weight)
        if sum(on.values()) <= sum(back.values()):
            return False
        return True if len(on) > warmed_up else None

    def global_step(self, local_step: int) -> int | None:
        return None if self.base is None else self.base + local_step - self.after


def by_place(loads: Iterable[Load], own: Executions) -> dict[int, list[Load]]:
    """The loads of an attempt, by the number of steps that were completed before them. `own`: the steps of the
    attempt's rank; if it makes none, the steps of all ranks count. Loads during the first step, and loads after the
    last step, are left out."""
    found: dict[int, list[Load]] = defaultdict(list)
    last, mono_s, rank = int(own.local_step.max(initial=0)), own.mono_s, own.rank
    for load in loads:
        mine, done = rank == load.rank, load.local_step
        if not mine.any():
            mine, done = rank >= 0, int(own.local_step[mono_s <= load.mono_s].max(initial=0))
        if load.mono_s <= mono_s[mine].min(initial=inf):
            found[0].append(load)
        elif 0 < done < last:
            found[done].append(load)
    return found


def at_step(own: Executions, step: int) -> dict[int, Execution]:
    """Each rank's execution of this local step of an attempt."""
    return {execution.rank: execution for execution in own.at(own.local_step == step)}


def may_begin(
    loads: Sequence[Load], before: Mapping[int, Execution], after: Mapping[int, Execution],
    unseen: bool = False,
) -> bool:  # fmt: skip
    """Whether a segment may begin between the steps `before` and `after` (given by rank) with these loads. It may not
    if all counters continue by one. It also may not if there is neither a counter nor a number in the loaded file,
    because the file may then hold data or another model; unless the job's state is `unseen`."""
    pairs = [(before[rank], execution) for rank, execution in after.items() if rank in before]
    if pairs and all(_counts_on(*pair) for pair in pairs):
        return False
    counted = unseen or any(execution.opt_step is not None for execution in after.values())
    return counted or any(number_in_contents(load.numbers) or number_in_name(load.path) is not None for load in loads)


def jumps(own: Executions, unseen: bool) -> set[int]:
    """The local steps after which the optimizer's own counter went back, or ahead, on all ranks; if the job's state is
    `unseen`, also those after which it stood still. A counter that goes ahead more than once belongs to several
    optimizers that take turns."""
    found, ahead = set(), 0
    if np.isnan(own.column("opt_step")).all():
        return {
            place - 1
            for place in _not_counted_on(own, "sched_step")
            if _fell(at_step(own, place - 1), at_step(own, place))
        }
    for place in _not_counted_on(own, "opt_step"):
        earlier, before, after = (at_step(own, place - back) for back in (2, 1, 0))
        pairs = [(before[rank], now) for rank, now in after.items() if rank in before]
        if all(_jumped(*pair) for pair in pairs) or (
            before.keys() <= earlier.keys() & after.keys()
            and all(_counted_again(earlier[was.rank], was, now, unseen) for was, now in pairs)
        ):
            found.add(place - 1)
            ahead += any((now.opt_step or 0) > (was.opt_step or 0) for was, now in pairs)
    return found if ahead < 2 else set()


def _fell(before: Mapping[int, Execution], after: Mapping[int, Execution]) -> bool:
    """Whether the counter of the LR schedule was lower than before on each rank."""
    pairs = [(before[rank].sched_step, now.sched_step) for rank, now in after.items() if rank in before]
    return bool(pairs) and all(was is not None and now is not None and now < was for was, now in pairs)


def _not_counted_on(own: Executions, counter: str) -> list[int]:
    """The local steps after which, on some rank, this counter was not higher than before, or higher by more than
    usual."""
    counts, found = own.column(counter), set[int]()
    for places in own.by_ranks():
        part = own.at(places)
        order = np.lexsort((part.local_step, part.rank))
        step, rank, count = (column[order] for column in (part.local_step, part.rank, counts[places]))
        by = np.where((np.diff(step) == 1) & (np.diff(rank) == 0), np.diff(count), np.nan)
        usual = np.nanmedian(by) if not np.isnan(by).all() else 1.0
        found |= set(step[1:][(by <= 0) | (by > usual)].tolist())
    return sorted(found)


def _jumped(before: Execution, after: Execution) -> bool:
    was, now = before.opt_step, after.opt_step
    return was is not None and now is not None and now not in (was, was + 1)


def _counted_again(earlier: Execution, before: Execution, after: Execution, unseen: bool) -> bool:
    """Whether a counter went back by one step and then counted the same step again, with the same samples, so that it
    seems unchanged. If the job's state is `unseen`, the samples may be others."""
    if before.opt_step in (None, earlier.opt_step) or after.opt_step != before.opt_step or after.skipped:
        return False
    if not unseen and after.samples_seen and before.samples_seen:
        return after.samples == before.samples
    return unseen or (after.loss_seen and after.losses == before.losses)


def _counts_on(before: Execution, after: Execution) -> bool:
    return (
        before.opt_step is not None
        and after.opt_step == before.opt_step + 1
        and (before.sched_step is None or after.sched_step == before.sched_step + 1)
    )


# The ends of processes, as places in the events: by pid, and by attempt and rank.
_Exits = defaultdict[object, dict[int, Event]]
_BORN = (Kind.RANK_UP, Kind.AGENT_STARTED, Kind.STEP, Kind.ELASTIC_WORKER)


@dataclass(frozen=True)
class Process:
    """The process that was a rank in one attempt. (pid, start_ticks) identifies it for ever."""

    pid: int | None
    start_ticks: int | None
    up_s: float  # first seen, CLOCK_MONOTONIC
    exited_s: float | None = None
    exit_code: int | None = None  # negative: signal; None: unknown, or still running


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks, until they have ended."""

    number: int
    submission: int
    ranks: Mapping[int, Process]
    started_s: float
    ended_s: float | None  # when the last of its ranks was gone
    world_size: int
    base: int | None = None  # global steps done before its first step; None: not known
    witnesses: tuple[Witness, ...] = ()
    conflicts: tuple[str, ...] = ()  # witnesses that disagree: evidence that some state was not restored
    loaded: str | None = None  # path of the checkpoint that it resumed from
    first_step: int | None = None  # global
    last_step: int | None = None
    segments: tuple[Segment, ...] = ()  # base, conflicts and loaded are those of the first segment

    @property
    def exit_codes(self) -> dict[int, int | None]:
        return {rank: process.exit_code for rank, process in self.ranks.items()}


def read(events: Sequence[Event]) -> list[Attempt]:
    """The attempts in order of number. Their `base` (the global step from which an attempt resumed) is not known yet.
    The events must be in order of time."""
    of_attempt: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.attempt is not None and event.kind in _BORN and event.rank is not None:
            of_attempt[event.attempt].append(event)
    starts = [(event.mono_s, int(event.data["submission"])) for event in events if event.kind is Kind.JOB_STARTED]
    if not of_attempt:  # only the job's own start and its log are known
        return [Attempt(n, submission, {}, start, None, 0) for n, (start, submission) in enumerate(starts)]
    exits: _Exits = defaultdict(dict)
    for place, event in enumerate(events):
        if event.kind in (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE):
            exits[event.data.get("pid")][place] = exits[event.attempt, event.rank][place] = event
    return [_attempt(number, of_attempt[number], exits, starts) for number in sorted(of_attempt)]


def _attempt(number: int, seen: list[Event], exits: _Exits, starts: list[tuple[float, int]]) -> Attempt:
    started = min(event.mono_s for event in seen)
    of_rank: dict[int, list[Event]] = defaultdict(list)
    for event in seen:
        if event.rank is not None:
            of_rank[event.rank].append(event)
    ranks = {rank: _process(number, rank, of_rank[rank], exits) for rank in sorted(of_rank)}
    sizes = [event.data["world_size"] for event in seen if event.data.get("world_size")]
    ends = [process.exited_s for process in ranks.values()]
    ended = max((end for end in ends if end is not None), default=None) if None not in ends else None
    submission = max(((start, n) for start, n in starts if start <= started), default=(0.0, 0))[1]
    return Attempt(number, submission, ranks, started, ended, sizes[-1] if sizes else len(ranks))


def _process(attempt: int, rank: int, seen: list[Event], exits: _Exits) -> Process:
    # Torchelastic names the process that it started, which may be a shell around the trainer.
    named = sorted(seen, key=lambda event: event.kind is Kind.ELASTIC_WORKER)
    pid = next((event.data["pid"] for event in named if event.data.get("pid")), None)
    ticks = next((event.data["start_ticks"] for event in seen if event.data.get("start_ticks")), None)
    near = sorted((exits[pid] | exits[attempt, rank]).items())
    own = [event for _place, event in near if _is_of(event, attempt, rank, pid, ticks)]
    gone = next((event for event in own if event.kind is Kind.RANK_EXITED), None)
    codes = [event.data.get("exit_code") for event in own]
    code = next((code for code in codes if code is not None), None)
    return Process(pid, ticks, seen[0].mono_s, gone.mono_s if gone else None, code)


def _is_of(event: Event, attempt: int, rank: int, pid: int | None, ticks: int | None) -> bool:
    if event.data.get("pid") is not None and pid is not None:
        other = event.data.get("start_ticks")
        return bool(event.data["pid"] == pid and (other is None or ticks is None or other == ticks))
    return event.attempt == attempt and event.rank == rank
