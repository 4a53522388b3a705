"""Whether a job ended successfully, in the step in which it should end, and what it left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torchaos.harness.analysis.checkpointing.carried_state import mixed_state
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import history_of
from torchaos.harness.analysis.comparison.losses import Comparison
from torchaos.harness.analysis.comparison.sample_counts import other_iterations
from torchaos.harness.analysis.ending import (
    TeardownAbort,
    aborts_at_exit,
    cause_of_end,
    ends_so_without_fault,
    failed_rank,
    final_step,
    never_ends_in_time,
    teardown_aborts,
)
from torchaos.harness.analysis.missing_data import why_unplaced, why_unseen
from torchaos.harness.interfaces import Finding, First, Outcome, What, failed, inconclusive, passed
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import History
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record


def completion(run: Record, twins: Sequence[Record], steps: int | None = None, outputs: Sequence[str] = ()) -> Finding:
    """Judges whether the job ended with exit code 0, in the step `steps` (None: the twin's last step), and left the
    files of the twin that fit the patterns `outputs`."""
    history = history_of(run, twins)
    due = steps if steps is not None else final_step(twins[0]) if twins else None
    aborts = teardown_aborts(run, due)
    ended = _ending(run, twins, history, due, aborts) or _unseen(run, twins, due)
    finding = ended or _steps(run, history, due, aborts) or _outputs(run, twins, outputs) or _well(history, due, aborts)
    if twins and not ended and finding.outcome is Outcome.FAILED:
        mixed = next(filter(None, (mixed_state(history, part) for part in history.segments)), "")
        why = mixed or other_iterations(history.by_step(), twins[0].history.by_step())
        other = "" if why else _stopped_otherwise(run, history, twins, steps)
        why = f": {why}" if why else other
        finding = replace(finding, reason=f"{finding.reason}{why}", cause=said("decides end") if other else "")
    last = history.last_step or 0
    is_other = not ended and due is not None and due != last
    first = First(What.LAST, min(last, due or 0)) if is_other else First(What.ENDING, last)
    measured = {"exit_code": run.exit_code, "last_step": history.last_step, "teardown_aborts": len(aborts)}
    return replace(finding, first=first, measured=measured, bound={} if due is None else {"exit_code": 0, "steps": due})


def _stopped_otherwise(run: Record, history: History, twins: Sequence[Record], steps: int | None) -> str:
    """A sentence on why the job stopped in another step than its twin; it follows another sentence. Empty if nothing
    shows why, or if a number of steps was given."""
    is_same = history.last_step == final_step(twins[0])
    if steps is not None or is_same or not all(made.executions.loss_seen.any() for made in (history, twins[0].history)):
        return ""
    why = Comparison(run, history, twins, None).why_other_end()
    return f". {why}" if why else ""


def _outputs(run: Record, twins: Sequence[Record], patterns: Sequence[str]) -> Finding | None:
    """The finding for a job that lacks a file which its twin wrote; None if it has all of them."""
    for pattern in patterns if twins else ():
        listed = [one.artifacts.get("files") for one in (run, twins[0])]
        if None in listed:
            return inconclusive("the files that the job left were not listed; run it again")
        ours, theirs = ([name for name in names or () if fnmatchcase(name, pattern)] for names in listed)
        if not theirs:
            return inconclusive(f"the twin left no file {pattern}; correct completed.outputs")
        if missing := sorted(set(theirs) - set(ours)):
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            extra = sorted(set(ours) - set(theirs))
            others = f"; {extra[0]} is there, which the twin has not" if extra else ""
            lacks = f"{missing[0]} is missing, which the twin has{more}{others}"
            return failed(f"the job ended well, and did not write all its results: {lacks}", missing=missing)
    return None


def _ending(
    run: Record, twins: Sequence[Record], history: History, due: int | None, aborts: Sequence[TeardownAbort]
) -> Finding | None:  # fmt: skip
    """The finding for a job that ended in a wrong way; None if it ended well."""
    stopped, exited, code = run.stopped, run.exited, run.exit_code
    if too_short := never_ends_in_time(run):
        return inconclusive(too_short)
    if stopped and (not exited or exited.mono_s >= stopped.mono_s):
        return _ended_by_torchaos(
            run, twins, stopped, due if history.last_step == due and not history.unplaced else None
        )
    if code is None:
        return inconclusive("nothing shows how the job ended")
    broken = failed_rank(run)
    if code == 0 and broken:
        how = f"rank {broken.rank} ended with exit code {broken.exit_code} in the last attempt"
        return failed(f"{how}, though the command's own exit code is 0{_cause(run)}")
    last = run.history.attempts[-1].number if run.history.attempts else None
    if aborts and aborts[-1].attempt == last:
        return None  # only the exit of the interpreter failed, and other checks verify the files
    seen = [one for one in aborts_at_exit(run, due) if one.attempt == last]
    if code == 0 and not seen:
        return None
    if not seen and ends_so_without_fault(run):
        return inconclusive(f"the job ended with exit code {code}, as it does without a fault{_cause(run)}")
    if not seen:
        return failed(f"the job ended with exit code {code}{_cause(run)}")
    return failed(f"the job ended with exit code {code}: {_abort(seen[-1])}; its last checkpoint could not be verified")


def _ended_by_torchaos(run: Record, twins: Sequence[Record], stopped: Event, done: int | None) -> Finding:
    """The finding for a job that did not end by itself. `done`: its last step, if that is the step in which it should
    end."""
    if done is None:
        return failed(f"the job did not end by itself: {stopped.data['reason']}")
    waited_s, steps = _waited_s(run, stopped), counted(done, "step", "was/were")
    ended = f"{waited_s:.0f} s later ({stopped.data['reason']})"
    if _too_early(twins, stopped, waited_s):
        return inconclusive(f"{steps} done, and torchaos ended the job {ended}: nobody waited for its exit")
    return failed(f"{steps} done, and the job never exited: torchaos ended it {ended}")


def _unseen(run: Record, twins: Sequence[Record], due: int | None) -> Finding | None:
    """The finding for a job whose twin made no step that was seen."""
    if due is not None or not twins:
        return None
    return inconclusive(f"exit code {run.exit_code}, and no step of the twin was seen: {why_unseen(twins[0], 'steps')}")


def _steps(run: Record, history: History, due: int | None, aborts: Sequence[TeardownAbort]) -> Finding | None:
    """The finding for a job that ended in a wrong step; None if the step is right or there is nothing to compare it
    with."""
    if due is None:
        return None
    if history.unplaced:
        return inconclusive(why_unplaced(run, history.unplaced))
    last = history.last_step
    if last is None:
        return inconclusive(f"no step was seen: {why_unseen(run, 'steps')}")
    if last < due:
        return failed(f"the job ended with exit code 0 in step {last}, {due - last} short of {due}")
    if last > due and not aborts:
        return failed(f"the job went on to step {last}, {last - due} beyond {due}")
    return None


def _well(history: History, due: int | None, aborts: Sequence[TeardownAbort]) -> Finding:
    note = f". Set aside: {_abort(aborts[0])}; torch's own fault, not the job's." if aborts else ""
    if due is None:
        return inconclusive(
            f"exit code 0 after step {history.last_step}, and without a twin nothing shows that this is the last step; "
            f"give `completed` the number of steps{note}"
        )
    code = "exit code 0" if not note else "the job was done"
    return passed(f"{code} after step {due}, the last one{note}")


def _abort(abort: TeardownAbort) -> str:
    return f"rank {abort.rank} aborted at interpreter exit, after its last step ({abort.last_step})"


def _cause(run: Record) -> str:
    known = cause_of_end(run, run.history.attempts[-1].number if run.history.attempts else 0)
    return f": {known}" if known else ""


_GRACE_S = 5.0  # A job that is done may take this many seconds longer than the twin to end.


def leftovers(run: Record, twins: Sequence[Record]) -> Finding:
    """Judges whether the job ended, and left no process, port, shared memory or GPU memory."""
    if run.stopped:
        return _never_ended(run, twins, run.stopped)
    left = run.artifacts.get("leftovers")
    if not isinstance(left, Mapping):
        return inconclusive("what the job left is not known: torchaos was attached to the job, or the job never ended")
    processes, shared = left.get("processes") or [], left.get("shared_memory") or []
    own, strange = [one for one in shared if one["of_job"]], [one for one in shared if not one["of_job"]]
    gpu = left.get("gpu_memory")
    measured = {"processes": len(processes), "shared_memory": len(own), "waited_s": left.get("waited_s")}
    found = [*_processes(processes, gpu or []), *_shared(own)]
    if found:
        too = " The twin leaves such things too, so the job does this without a fault." * _any_left(twins)
        return failed(f"the job had ended, and left {' and '.join(found)}.{too}", **measured)
    if strange:
        names = ", ".join(str(one["name"]) for one in strange[:3])
        return inconclusive(
            f"new entries in /dev/shm ({len(strange)}: {names}) may belong to the job or to another program: no "
            "process of the job was seen to use them",
            **measured,
        )
    unseen = "; GPU memory was not looked at" if gpu is None else ""
    return passed(f"nothing was left of the job: no process, no port, no shared memory{unseen}", **measured)


def _never_ended(run: Record, twins: Sequence[Record], stopped: Event) -> Finding:
    due = final_step(twins[0]) if twins else None
    last, reason = run.history.last_step, str(stopped.data["reason"])
    if due is None or last is None or last < due:
        return inconclusive(f"the job did not end by itself ({reason}), so nothing is known about what it left")
    waited_s = _waited_s(run, stopped)
    if _too_early(twins, stopped, waited_s):
        return inconclusive(
            f"the job was ended {waited_s:.1f} s after its last step ({reason}): nobody waited for it to end by itself"
        )
    ranks = run.history.attempts[-1].ranks
    alive = sorted(rank for rank, one in ranks.items() if one.exited_s is None or one.exited_s >= stopped.mono_s)
    ranks_were = f"rank {alive[0]} was" if len(alive) == 1 else f"ranks {', '.join(map(str, alive))} were"
    who = ranks_were if alive else "its command was"
    return failed(
        f"the job was done after step {last} and did not end: {who} still there {waited_s:.0f} s later "
        f"({reason}). {said('waits for ever')}",
        First(What.ENDING, last),
        seconds=round(waited_s, 1),
    )


def _waited_s(run: Record, stopped: Event) -> float:
    """The seconds from the job's last step to the time at which torchaos ended the job."""
    return stopped.mono_s - (run.history.executions.last_s() or stopped.mono_s)


def _too_early(twins: Sequence[Record], stopped: Event, waited_s: float) -> bool:
    """Whether the job might still have ended by itself when torchaos ended it: since its last step it had hardly more
    time than its twin took."""
    ends = [(event.mono_s, twin) for twin in twins[:1] for event in twin.of_kind(Kind.JOB_EXITED)]
    usual_s = max((at_s - (twin.history.executions.last_s() or at_s) for at_s, twin in ends), default=0.0)
    return bool(stopped.data.get("enough") or stopped.data.get("interrupted")) or waited_s < usual_s + _GRACE_S


def _processes(processes: Sequence[Mapping[str, Any]], gpu: Sequence[Mapping[str, Any]]) -> list[str]:
    if not processes:
        return []
    first = processes[0]
    ports = sorted({port for process in processes for port in process["ports"]})
    listening = f", listening on port {', '.join(map(str, ports))}" if ports else ""
    used = sum(int(one["bytes"]) for one in gpu)
    holding = f", holding {used / 2**20:.0f} MiB of GPU memory" if used else ""
    many = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
    return [f"{many} (pid {first['pid']}: {first['command'][:80]}{listening}{holding})"]


def _shared(own: Sequence[Mapping[str, Any]]) -> list[str]:
    if not own:
        return []
    size = sum(int(one["bytes"]) for one in own)
    many = "1 entry" if len(own) == 1 else f"{len(own)} entries"
    return [f"{many} in /dev/shm ({own[0]['name']}; {size} bytes in all)"]


def _any_left(twins: Sequence[Record]) -> bool:
    found = [twin.artifacts.get("leftovers") for twin in twins]
    return any(
        isinstance(one, Mapping) and (one.get("processes") or any(s["of_job"] for s in one.get("shared_memory") or []))
        for one in found
    )
