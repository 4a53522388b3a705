"""What a job left behind when it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.ending import final_step
from torchaos.harness.interfaces import Finding, First, What, failed, inconclusive, passed
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record

_GRACE_S = 5.0  # A job that is done may take this many seconds longer than the twin to end.


def leftovers(run: Record, twins: Sequence[Record]) -> Finding:
    """Whether the job ended, and left no process, port, shared memory or GPU memory."""
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
    waited_s = stopped.mono_s - (run.history.executions.last_s() or 0.0)
    if stopped.data.get("enough") or stopped.data.get("interrupted") or waited_s < _usual_s(twins[0]) + _GRACE_S:
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


def _usual_s(twin: Record) -> float:
    """The seconds from the twin's last step to the end of its command."""
    ends = [event.mono_s for event in twin.of_kind(Kind.JOB_EXITED)]
    return max(ends) - (twin.history.executions.last_s() or 0.0) if ends else 0.0


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
