"""Two of the gates that every fault must pass before assertions count: that it landed as planned, and that it was
outlived. Pure. Each injector decides the third gate: that it was felt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torchaos.harness.agent.plan import Moment
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.contracts import Target
from torchaos.harness.judging.ending.ending import ended_on_purpose_s, failed_rank, own_exit_code
from torchaos.harness.judging.gaps.unseen import ended_before_steps, why_unplaced
from torchaos.harness.judging.landing.whom import hit_target, strayed
from torchaos.harness.judging.recovery.recovery import never_in_words, recoveries, why_moot
from torchaos.harness.record.history.history import is_down
from torchaos.harness.record.plan import ENDED_BEFORE, PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Verdict


def landed_wrong(run: Record, fault: PlannedFault, hits: Sequence[Event]) -> str | None:
    """Why the fault landed at a wrong place or time, or too often or too seldom, as a clause. None if it landed as
    planned. The step is checked against the history, which does not depend on the agent's own count."""
    place = _wrong_place(fault, hit_target(run, fault, hits), hits)
    missed = [
        event for event in run.of_fault(fault.id, Kind.MISSED) if place or not _is_of_a_later_attempt(event, hits)
    ]
    if missed:
        return f"it did not land as often as planned: {missed[0].data['reason']}"
    wrong = strayed(run, fault, hits) or place
    return wrong or next(filter(None, (_wrong_time(run, fault, hit) for hit in hits)), None)


def _is_of_a_later_attempt(missed: Event, hits: Sequence[Event]) -> bool:
    """Whether the event comes from an attempt after the last landing: a job that a scheduler starts again may get the
    order again."""
    return missed.attempt is not None and all(hit.attempt is not None and hit.attempt < missed.attempt for hit in hits)


def _wrong_place(fault: PlannedFault, target: Target, hits: Sequence[Event]) -> str | None:
    landed = Counter(hit.rank for hit in hits)
    strangers = landed.keys() - {None, *target.ranks}
    if strangers:
        return f"it landed on rank {min(each for each in strangers if each is not None)}, which is not its target"
    on_agents = landed.keys() == {None}
    due = {None: fault.times * max(1, len(target.nodes))} if on_agents else dict.fromkeys(target.ranks, fault.times)
    for rank, times in due.items():
        if landed[rank] != times:
            where = "" if rank is None else f" on rank {rank}"
            return f"it landed {landed[rank]} of {times} times{where}" if landed[rank] else f"it never landed{where}"
    return None


def _wrong_time(run: Record, fault: PlannedFault, hit: Event) -> str | None:
    when = fault.trigger
    if not isinstance(when, Moment):
        return None
    held = [event for event in run.of_fault(fault.id, Kind.HELD) if event.mono_s <= hit.mono_s]
    if fault.where == "node" and not held:
        return "no rank was held at the moment of the fault"
    at = hit if fault.where == "rank" else held[-1]
    attempts = {at.attempt, hit.attempt} - {None}
    if len(attempts) > 1 or (when.attempt is not None and attempts != {when.attempt}):
        due = at.attempt if when.attempt is None else when.attempt
        return f"it was planned for attempt {due}, and landed in attempt {hit.attempt}"
    if when.phase is not None and at.data["phase"] != when.phase.value:
        return f"it was planned for phase {when.phase.value}, and landed in {at.data['phase']}"
    # The time of the fault counts, not the time of the hold, because the rank may have gone on by itself meanwhile.
    done = run.history.steps_done(at.rank, at.attempt, hit.mono_s) if when.step is not None else None
    if when.step is not None and (done is None or done + 1 != when.step):
        where = "an unknown step" if done is None else f"step {done + 1}"
        return f"it was planned for step {when.step}, and landed in {where}"
    return None


def never_reached(run: Record, fault: PlannedFault) -> bool:
    """Whether the run ended before the planned point of the fault."""
    if any(run.of_fault(fault.id, Kind.APPLYING, Kind.HELD)):
        return False
    when = fault.trigger
    if isinstance(when, Moment):
        return when.step is not None and when.step > (run.history.highest_step() or 0) + 1
    missed = list(run.of_fault(fault.id, Kind.MISSED))  # older journals have only the reason, not the field
    return bool(missed) and all(e.data.get("ended_before", e.data["reason"] == ENDED_BEFORE) for e in missed)


def never_started(run: Record) -> str | None:
    """Why nothing can be judged: the run was ended before its job was started, or was interrupted before its first
    step."""
    if not run.stopped:
        return None
    if not run.plan.job.attached and not any(run.of_kind(Kind.JOB_STARTED)):
        return "the job was never started, so there is nothing to judge"
    ended = ended_before_steps(run) if run.stopped.data.get("interrupted", True) else ""
    return f"{ended}, so there is nothing to judge" if ended else None


def ranks_repeat(run: Record) -> str | None:
    """Why the history can't be trusted: two programs made steps as the same rank of the same attempt. A program that
    replaces itself (exec) writes to a file of the same name with an x added (agent/arming.py)."""
    sources = run.sources_of_steps
    twice = next((key for key, found in sorted(sources.items()) if len(found) > 1), None)
    if twice is None:
        return None
    attempt, rank = twice
    if len({source.rstrip("x") for source in sources[twice]}) == 1:
        return (
            f"rank {rank} of attempt {attempt} replaced its own program (exec) and then made more steps: the steps "
            "before and after that can't be told apart"
        )
    return (
        f"rank {rank} of attempt {attempt} was {len(sources[twice])} processes, which all made steps, as in a job of "
        "several torchruns: it is not known which process made which step"
    )


def not_outlived(run: Record, twins: Sequence[Record], fault: PlannedFault) -> tuple[Verdict, str] | None:
    """The verdict on a fault that the job has not outlived, and why. None if it was outlived. A job has not recovered
    if it never got past its highest step before the fault, or if it later ends with an error: failed. If the run was
    ended on purpose while the job was down again for another reason than a fault: inconclusive."""
    if not run.history.executions:
        return Verdict.INCONCLUSIVE, "no step could be seen, so nothing shows that the job went on"
    code, reached = own_exit_code(run), run.history.highest_step() or 0
    behind = {recovery.fault for recovery in recoveries(run, twins) if recovery.parts["caught_up"] is None}
    if fault.id not in behind:
        if code not in (None, 0):
            return Verdict.FAILED, f"the job got past the fault, and then ended with exit code {code} in step {reached}"
        if broken := failed_rank(run):
            how = f"rank {broken.rank} ended with exit code {broken.exit_code} in step {reached}"
            return (
                Verdict.FAILED,
                f"the job got past the fault, and then {how}, though the command's own exit code is {code}",
            )
        if not behind and (stopped_s := ended_on_purpose_s(run)) and is_down(run.history, run.beside_steps, stopped_s):
            return Verdict.INCONCLUSIVE, "the job got past the fault, and was down again when the run was ended"
        return None
    if run.history.unplaced:
        return Verdict.INCONCLUSIVE, why_unplaced(run, run.history.unplaced)
    if run.ended_on_purpose:
        return Verdict.INCONCLUSIVE, "the run was ended on purpose before the job had recovered; see its `until`"
    if why := why_moot(run, fault.id, twins):
        return Verdict.INCONCLUSIVE, why
    return Verdict.FAILED, f"the job {never_in_words(run, fault.id, twins)}"
