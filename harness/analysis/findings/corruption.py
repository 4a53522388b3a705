"""Whether silent corruption was found, and how somebody reacted to a failing GPU.

The training state after a step is bad if the check sum of the parameters differs from the twin's after the same step,
or differs between ranks that hold replicas. A check sum covers all bits, so the smallest difference counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchaos.harness.analysis.checkpointing.checkpoint_contents import Clash, checkpoints_of
from torchaos.harness.analysis.checkpointing.checkpoint_diff import clashes
from torchaos.harness.analysis.hit_targets import Gpu, Landing, landings, ranks_on, unplaced_on
from torchaos.harness.interfaces import Evidence, Finding, failed, inconclusive, passed, unhit
from torchaos.harness.protocol.check_sums import is_whole
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import Execution
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.registry import family_of

_EXITS = (Kind.RANK_EXITED, Kind.ELASTIC_FAILURE)


@dataclass(frozen=True)
class Step:
    """One global step as one attempt executed it on all its ranks."""

    number: int
    attempt: int
    over_s: float  # when the last rank had finished it, CLOCK_MONOTONIC
    ranks: Mapping[int, Execution]

    @property
    def replicas_differ(self) -> bool | None:
        """Whether the ranks hold different parameters. None if they can't be compared, because a rank's parameters were
        not seen or are only a part of the model."""
        sums = [execution.parameters for execution in self.ranks.values()]
        if len(sums) < 2 or not all(each is not None and is_whole(each) for each in sums):
            return None
        return len(set(sums)) > 1

    def differs_from(self, twin: Mapping[int, Execution] | None) -> bool | None:
        """Whether the parameters of a rank differ from the twin's. None if a rank's parameters were not seen, in the
        run or in the twin."""
        pairs = [
            (execution.parameters, twin[rank].parameters)
            for rank, execution in self.ranks.items()
            if twin and rank in twin
        ]
        if not pairs or any(None in pair for pair in pairs):
            return None
        return any(ours != theirs for ours, theirs in pairs)

    @property
    def losses(self) -> list[float]:
        return [loss for execution in self.ranks.values() for loss in execution.losses if loss is not None]


def steps_of(record: Record) -> list[Step]:
    """All steps that were executed, including steps that were executed again later, in order of attempts and steps."""
    found: dict[tuple[int, int], dict[int, Execution]] = {}
    for execution in record.history.executions:
        if execution.global_step is not None:
            found.setdefault((execution.attempt, execution.global_step), {})[execution.rank] = execution
    steps = (
        Step(number, attempt, max(execution.mono_s for execution in ranks.values()), ranks)
        for (attempt, number), ranks in found.items()
    )
    return sorted(steps, key=lambda step: (step.attempt, step.number))


def bad_steps(record: Record, twins: Sequence[Record]) -> list[Step] | None:
    """The steps after which the state was bad. None if the state is not known after any step."""
    theirs = [twin.history.by_step() for twin in twins]
    verdicts = [(step, _differs(step, theirs), step.replicas_differ) for step in steps_of(record)]
    if all(by_twin is None and by_replica is None for _step, by_twin, by_replica in verdicts):
        return None
    return [step for step, by_twin, by_replica in verdicts if by_twin or by_replica]


def _differs(step: Step, twins: Sequence[Mapping[int, Mapping[int, Execution]]]) -> bool | None:
    """Whether the step differs from every twin. A state that one of the twins has too is not bad."""
    found = [step.differs_from(twin.get(step.number)) for twin in twins]
    return None if not found or None in found else all(found)


@dataclass(frozen=True)
class Sighting:
    """The first time that one kind of witness showed the corruption."""

    who: str  # "replicas", "norm", "loss" or "job"
    step: int | None  # global
    at_s: float
    back_to: int | None = None  # the job did not end the attempt, but went back to the state after this step


def sightings(record: Record, since_s: float, twins: Sequence[Record] = ()) -> list[Sighting]:
    """When each witness of the corruption showed it first, from `since_s` on (CLOCK_MONOTONIC), in order of time. The
    witnesses are: replicas that differ, a loss that is not finite, a spike of the gradient norm, and the job. The job
    shows it if a rank ends itself with an error, or if ranks go back to an earlier state and no twin does so. The job
    does not count if another fault landed after `since_s` and before it, because that may be its reason."""
    steps, found = steps_of(record), []
    later = [step for step in steps if step.over_s >= since_s]
    differing = next((step for step in later if step.replicas_differ), None)
    if differing is not None:
        found.append(Sighting("replicas", differing.number, differing.over_s))
    not_finite = next((step for step in later if any(not math.isfinite(loss) for loss in step.losses)), None)
    if not_finite is not None:
        found.append(Sighting("loss", not_finite.number, not_finite.over_s))
    spike = next(_spikes(record, since_s), None)
    if spike is not None:
        found.append(Sighting("norm", _under_way(record, spike), spike.mono_s))
    # The job goes back without a fault, too.
    usual = any(twin.history.program_returns or any(part.after for part in twin.history.segments) for twin in twins)
    by_job = [*_refusals(record, since_s, steps), *(() if usual else _returns(record, since_s))]
    own = min(by_job, key=lambda sighting: sighting.at_s, default=None)
    if own and not any(since_s < landing.at_s <= own.at_s for landing in landings(record)):
        found.append(own)  # otherwise another fault may be the reason
    return sorted(found, key=lambda sighting: sighting.at_s)


def _refusals(record: Record, since_s: float, steps: Sequence[Step]) -> Iterator[Sighting]:
    for event in record.of_kind(*_EXITS):
        if event.mono_s >= since_s and _is_refusal(event):
            done = [step.number for step in steps if step.over_s <= event.mono_s]
            yield Sighting("job", max(done, default=0) + 1, event.mono_s)


def _returns(record: Record, since_s: float) -> Iterator[Sighting]:
    history = record.history
    for attempt in history.attempts:
        for segment in history.put_back(attempt.number, since_s):
            first_s = history.of_segment(segment.number, segment.after).first_s()
            reached = history.highest_step(before_s=first_s) if first_s is not None else None
            if first_s is not None and reached is not None and segment.base is not None and segment.base < reached:
                yield Sighting("job", reached + 1, first_s, segment.base)


def _is_refusal(event: Event) -> bool:
    """Whether a rank ended itself with an error. An exit code that is negative, or 128 or more, means that a signal
    killed it; 0 means success."""
    code = event.data.get("exit_code")
    return isinstance(code, int) and 0 < code < 128


def _spikes(record: Record, since_s: float) -> Iterator[Event]:
    """The notes of agents about a gradient norm that is not finite or is 10 times its rolling mean."""
    return (e for e in record.of_kind(Kind.NOTE) if "norm" in e.data and e.mono_s >= since_s)


def _under_way(record: Record, event: Event) -> int | None:
    done = record.history.steps_done(event.rank, event.attempt, event.mono_s)
    return None if done is None else done + 1


def seen_by_others(record: Record, fault: str) -> Evidence | None:
    """Evidence from ranks that were not hit: after the landing, and not before, the ranks hold different parameters, or
    a rank that was not hit saw a spike of the gradient norm."""
    landing = next((landing for landing in landings(record) if landing.fault == fault), None)
    effect = next(record.of_fault(fault, Kind.EFFECT), None)
    if landing is None or effect is None:
        return None
    spikes = [note for note in _spikes(record, 0.0) if note.rank not in landing.ranks]
    if spikes and spikes[0].mono_s >= landing.at_s:
        words = f"{effect.data['effect']}; on rank {spikes[0].rank}, which was not hit, {spikes[0].data['text']}"
        return Evidence.of(words, spikes[0])
    first = next((step for step in steps_of(record) if step.replicas_differ), None)
    if first is None or first.over_s < landing.at_s or set(first.ranks) <= landing.ranks:
        return None
    words = f"{effect.data['effect']}; after step {first.number} the ranks no longer hold the same parameters"
    return Evidence.of(words, effect)


def seen_by_twin(record: Record, twins: Sequence[Record], fault: str) -> Evidence | None:
    """Evidence from the first twin: after the landing, and not before, a rank that was not hit has other parameters
    than in the twin. In a job of one rank, the target itself counts."""
    landing = next((landing for landing in landings(record) if landing.fault == fault), None)
    effect = next(record.of_fault(fault, Kind.EFFECT), None)
    if landing is None or effect is None:
        return None
    theirs = twins[0].history.by_step()
    first = next((step for step in steps_of(record) if step.differs_from(theirs.get(step.number))), None)
    if first is None or first.over_s < landing.at_s:
        return None
    alone = len(first.ranks) == 1
    others = [
        rank for rank, done in first.ranks.items()
        if (alone or rank not in landing.ranks) and done.parameters != theirs[first.number][rank].parameters
    ]  # fmt: skip
    if not others:
        return None
    words = (
        f"{effect.data['effect']}; after step {first.number} the parameters of rank {others[0]} differ from the twin's"
    )
    return Evidence.of(words, effect)


_WHO = {
    "replicas": "comparing the replicas' parameters", "norm": "the gradient norm, over 10 times its rolling mean",
    "loss": "the loss, which is not finite", "job": "the job itself, which ended the attempt",
}  # fmt: skip


@dataclass(frozen=True)
class Corruption:
    """Judges whether corruption was found in at most `within` steps, by anybody or by the job, and whether no
    checkpoint holds bad state."""

    within: int = 10
    by: Literal["anybody", "job"] = "anybody"

    def finding(self, run: Record, twins: Sequence[Record]) -> Finding:
        hits = _corruptions(run)
        if not hits:
            return unhit("no fault landed, so there was nothing to find")
        bad = bad_steps(run, twins)
        if bad is None:
            return inconclusive("the state of no step could be seen, so it is not known whether it was bad")
        since_s = hits[0].at_s
        early = [step for step in bad if step.over_s < since_s]
        if early:
            return inconclusive(f"the state was not as in the twin after step {early[0].number}, before any fault")
        seen = [
            sighting for sighting in sightings(run, since_s, twins) if self.by == "anybody" or sighting.who == "job"
        ]
        own = [step for step in bad if step.attempt == hits[0].attempt]
        saved = _saved_bad(run, twins, own)
        measured = _measured(run, since_s, bad, seen, saved)
        return replace(
            self._judge(run, twins, hits[0], bad, seen, saved), measured=measured, bound={"within": self.within}
        )

    def _judge(
        self,
        run: Record,
        twins: Sequence[Record],
        hit: Landing,
        bad: list[Step],
        seen: list[Sighting],
        saved: str | None,
    ) -> Finding:
        since_s = hit.at_s
        if saved:
            found = f"; {_told(seen[0], since_s, run)}" if seen else "; nobody found it"
            return failed(f"bad state reached a checkpoint: {saved}{found}")
        later = [step for step in bad if step.attempt > hit.attempt]
        if later:
            return inconclusive(
                f"the job resumed from good state, and after step {later[0].number} it still differs from the twin's: "
                "perhaps only because numbers are added in another order; see loss_continuity"
            )
        if not twins and not bad:
            return inconclusive("without a twin, a corruption that all replicas share can't be found")
        if not seen and not bad:
            return inconclusive("the state was that of the twin after each step, so there was nothing to find")
        if not seen:
            return failed(f"nobody found it in {len(bad)} bad steps, the first of them step {bad[0].number}")
        took = _steps_until(run, seen[0], since_s)
        if took > self.within:
            return failed(f"it took {counted(took, 'step')} until it was found: {_told(seen[0], since_s, run)}")
        if not twins:
            return inconclusive(
                f"{_told(seen[0], since_s, run)}; without a twin, checkpoints with bad state can't be found"
            )
        unseen = _unseen(run, twins)
        clash = _clash(run, twins)
        if clash is not None:
            return inconclusive(f"{clash.path}, saved after the restart, differs from the twin's in {clash.name}")
        if unseen:
            return inconclusive(f"{_told(seen[0], since_s, run)}; {unseen}")
        return passed(f"{_told(seen[0], since_s, run)}; no checkpoint holds bad state")


def _told(first: Sighting, since_s: float, run: Record) -> str:
    took = _steps_until(run, first, since_s)
    who = _WHO[first.who] if first.back_to is None else f"the job itself, which went back to step {first.back_to}"
    return f"found after {counted(took, 'step')} by {who}"


def _steps_until(run: Record, first: Sighting, since_s: float) -> int:
    """The number of steps that ended from the moment when the fault landed until the corruption was found. It is 1 if
    the corruption was found in the step that it hit."""
    before = run.history.highest_step(before_s=since_s) or 0
    return max(1, (first.step or before) - before)


def _corruptions(run: Record) -> list[Landing]:
    """The landings of faults that corrupt numbers; all landings if no fault is known to do so."""
    hits, planned = landings(run), {fault.id: fault.inject for fault in run.plan.faults}
    return [hit for hit in hits if family_of(planned.get(hit.fault, "")) == "numeric"] or hits


def _saved_bad(run: Record, twins: Sequence[Record], own: list[Step]) -> str | None:
    """The name of a checkpoint that holds bad state; None if there is none. In the attempt that was hit, a checkpoint
    that was saved after one of the bad steps (`own`) is bad. Otherwise, if nothing was restarted, the contents on disk
    decide."""
    steps = {(step.attempt, step.number) for step in own}
    for save in run.history.saves:
        if save.ok and (save.attempt, save.global_step) in steps:
            return f"{save.path}, saved after step {save.global_step}, whose parameters were bad"
    clash = _clash(run, twins)
    saved_in = {save.global_step: save.attempt for save in run.history.saves}
    hit = _corruptions(run)[0].attempt
    if clash is not None and saved_in.get(clash.step, hit) <= hit:
        return f"{clash.path} differs from the twin's in {clash.name}"
    return None


def _clash(run: Record, twins: Sequence[Record]) -> Clash | None:
    ours, theirs = checkpoints_of(run), checkpoints_of(twins[0]) if twins else None
    if ours is None or theirs is None:
        return None
    varying = {clash.name for other in twins[1:] for clash in clashes(checkpoints_of(other) or [], theirs)}
    return next((clash for clash in clashes(ours, theirs, varying) if clash.kind == "tensor"), None)


def _unseen(run: Record, twins: Sequence[Record]) -> str | None:
    """Why it is not known whether a checkpoint is bad. None if it is known."""
    ours, theirs = checkpoints_of(run), checkpoints_of(twins[0])
    if ours is None or theirs is None:
        return "the contents of the checkpoints could not be read"
    if not [one for one in ours if one.good]:
        return "no checkpoint that could be compared is left"
    return None


def _measured(run: Record, since_s: float, bad: list[Step], seen: list[Sighting], saved: str | None) -> dict[str, Any]:
    first = seen[0] if seen else None
    return {
        "found_by": first.who if first else None, "after_steps": _steps_until(run, first, since_s) if first else None,
        "bad_steps": len(bad), "bad_checkpoint": saved, "seen_by": [sighting.who for sighting in seen],
    }  # fmt: skip


def is_of_gpu(run: Record, hit: Landing) -> bool:
    return any(fault.id == hit.fault and family_of(fault.inject) == "gpu" for fault in run.plan.faults)


def noticed_s(run: Record, hit: Landing) -> float | None:
    """Seconds from the fault until a process that watches GPUs got the first changed answer; None: no process did."""
    answers = [e for e in run.of_fault(hit.fault, Kind.EFFECT) if "served_to" in e.data]
    at = min((float(event.data.get("served_mono_s", event.mono_s)) for event in answers), default=None)
    return None if at is None else round(max(0.0, at - hit.at_s), 6)


def checkpointed_s(run: Record, hit: Landing) -> float | None:
    """Seconds from the fault until the first save that began after the fault was complete. None: there was no such
    save."""
    ends = [save.ended_s for save in run.history.saves if save.ok and save.begun_s >= hit.at_s]
    at = min((end for end in ends if end is not None), default=None)
    return None if at is None else round(at - hit.at_s, 6)


def drained_s(run: Record, hit: Landing, gpus: frozenset[Gpu]) -> float | None:
    """Seconds from the fault until the last rank on those GPUs had ended with an error; 0 if none was on them. None:
    not all of them did."""
    there = {up.data["pid"] for up in ranks_on(run, gpus) if up.attempt == hit.attempt} or hit.pids
    if not hit.ranks and gpus and there == hit.pids:
        return 0.0
    gone = {
        e.data["pid"]: e.mono_s
        for e in run.of_kind(Kind.RANK_EXITED)
        if e.mono_s >= hit.at_s and e.data["exit_code"] != 0
    }
    if not there or not there <= gone.keys():
        return None
    return round(max(gone[pid] for pid in there) - hit.at_s, 6)


def used_again(run: Record, hit: Landing, gpus: frozenset[Gpu]) -> Finding | None:
    """Finds a rank that stayed on those GPUs, or was started on one again. None if there is none."""
    if not gpus:
        return inconclusive(f"{hit.fault}: it is not known which GPU was hit: no rank was seen to come up on it")
    if drained_s(run, hit, gpus) is None:
        return failed(f"{hit.fault}: the ranks on that GPU never left")
    for up in ranks_on(run, gpus):
        if (up.attempt or 0) > hit.attempt:
            return failed(f"{hit.fault}: rank {up.rank} was started on the same GPU again, in attempt {up.attempt}")
    for up in unplaced_on(run, {node for node, _ in gpus}):
        if (up.attempt or 0) > hit.attempt:
            return inconclusive(f"{hit.fault}: it is not known which GPU rank {up.rank} uses in attempt {up.attempt}")
    return None
