"""What a reader needs if a run did not pass: the log around each fault, the hangs, the dumps of collectives, and a
sentence for each event."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchaos.harness.analysis.hit_targets import Landing, landings
from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.diagnosis import flight_recorder
from torchaos.harness.monitoring.diagnosis.wait_graph import Call
from torchaos.harness.protocol import collective_stamps
from torchaos.harness.protocol.collective_stamps import Stamp
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import Plan, counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.terminal.narrator import Narrator, exit_in_words
from torchaos.harness.reporting.terminal.text import on_one_line

_MOST = 300  # characters
_STATES = {"T": "is stopped", "t": "is stopped by a debugger", "Z": "is dead", "D": "waits in the kernel"}
_WORKERS = {"START": "starts", "SUCCEEDED": "sees the success of", "FAILED": "sees the failure of"}


def words(plan: Plan, events: Sequence[Event]) -> Iterator[tuple[Event, str]]:
    """A sentence for each event, or the event's data if there is no sentence for it."""
    narrator = Narrator(plan)
    for event in events:
        line = narrator.tell(event)
        quiet = _QUIET.get(event.kind, _bare)
        yield event, line.text if line else on_one_line(quiet(event))[:_MOST]


def _bare(event: Event) -> str:
    data = ", ".join(f"{name} {value}" for name, value in event.data.items() if value not in (None, "", {}, []))
    return f"{_who(event)}: {event.kind.value.rpartition('.')[2].replace('_', ' ')} {data}".removeprefix(": ")


def _who(event: Event) -> str:
    return f"rank {event.rank}" if event.rank is not None else ""


def _worker(event: Event) -> str:
    verb = _WORKERS.get(event.data["state"], f"reports {event.data['state']} of")
    return f"torchelastic {verb} {_local(event)}"


def _local(event: Event) -> str:
    local = event.data.get("local_rank")
    return f"{'a rank' if local is None else f'local rank {local}'} (pid {event.data['pid']})"


def _guarded(event: Event) -> str:
    fault, why = event.data["record"], event.data.get("why")
    changes = ", ".join(str(kind).replace("_", " ") for kind in event.data["handles"])
    return f"{fault} can't be undone: {why}" if why else f"{fault}: how to undo it is on disk ({changes})"


def _healed(event: Event) -> str:
    kind = str(event.data["handle"].get("kind", "a change")).replace("_", " ")
    return f"{event.data['record']}: {kind} {'undone, and verified' if event.data['verified'] else 'NOT undone'}"


_QUIET: Mapping[Kind, Callable[[Event], str]] = {
    Kind.STAGE: lambda e: {"prepare": "the run begins", "run": "the job is watched", "end": "the run is over"}.get(
        e.data["stage"], str(e.data["stage"])
    ),
    Kind.PROBED: lambda e: f"{e.data['probe']} {'holds' if e.data['holds'] else 'does not hold'}",
    Kind.NODE_STARTED: lambda e: f"node {e.data['node']} runs its command as pid {e.data['pid']}",
    Kind.NODE_EXITED: lambda e: f"node {e.data['node']}: the command ended with {exit_in_words(e.data['exit_code'])}",
    Kind.CLOCK: lambda e: (
        f"node {e.data['node']}: {e.data['offset_s']:.6f} s must be added to its clock, "
        f"with an error of at most {e.data['error_s']:.6f} s"
    ),
    Kind.ELASTIC_WORKER: _worker,
    Kind.ELASTIC_TEARDOWN: lambda e: f"torchelastic ends {_local(e)} with {e.data['signal']}",
    Kind.ELASTIC_RENDEZVOUS: lambda e: f"the rendezvous {'is complete' if e.data['done'] else 'begins'}",
    Kind.TORCHRUN: lambda e: f"torchrun (pid {e.data['pid']}) {'has ended' if e.data['ended'] else 'begins'}",
    Kind.RANK_UP: lambda e: f"{_who(e)} is up (pid {e.data['pid']})",
    Kind.RANK_STATE: lambda e: f"{_who(e)} {_STATES.get(e.data['state'], 'runs')} (pid {e.data['pid']})",
    Kind.RANK_EXITED: lambda e: f"{_who(e)} ended with {exit_in_words(e.data['exit_code'])} (pid {e.data['pid']})",
    Kind.GROUP_JOINED: lambda e: f"{_who(e)} has joined the process group",
    Kind.AHEAD: lambda e: f"{_who(e)}: the optimizer's own counter is {e.data['steps']} ahead of the training",
    Kind.AGENT_ENDED: lambda e: f"{_who(e)}: the agent has ended",
    Kind.APPLIED: lambda e: f"{e.data['fault']} is in place",
    Kind.ROLLED_BACK: lambda e: f"{e.data['fault']}: nothing is left to undo",
    Kind.GUARDED: _guarded,
    Kind.HEALED: _healed,
    Kind.KEPT: lambda e: f"{_who(e)}: the check sums of {len(e.data['parameters'])} parameters are taken for a save",
    Kind.BEGUN: lambda e: f"{_who(e)}: the check sums of the state with which the step begins are taken",
    Kind.RENAMED: lambda e: (
        f"{_who(e)} renames {posixpath.basename(e.data['path'])} to {posixpath.basename(e.data['to'])}"
    ),
    Kind.REMOVED: lambda e: f"{_who(e)} removes {posixpath.basename(e.data['path'])}",
    Kind.HANG_OPINION: lambda e: f"the observer {e.data['observer']}: {e.data['opinion']}; {e.data['detail']}",
    Kind.WRITER_ENDED: lambda e: f"{_who(e)}: the process that saved has ended (pid {e.data['child']})",
}


BEFORE, AFTER, TAIL = 20, 40, 40  # lines
_MOST_BYTES, _LONGEST = 32 << 20, 400  # bytes of a log that are searched; characters of a line that are shown
_MOST_FILES, _MOST_CALLS = 64, 6
_DUMP = re.compile(r"(?:trace|fr|flight)[\w.-]*rank[_-]?\d+|nccl_trace", re.I)


def logs_of(folder: RunDir, run: Record) -> list[dict[str, Any]]:
    """For each submission's log: the lines around each fault, and the last lines."""
    found = []
    for path in sorted(folder.logs.glob("*.log")):
        lines, whole = _lines(path)
        pieces, last_place = [], -AFTER
        for landing, place in _places(run, lines):
            if abs(place - last_place) > BEFORE:
                pieces.append(_piece(f"around {landing.fault}", lines, place, BEFORE, AFTER))
                last_place = place
        pieces.append(_piece("the end", lines, len(lines), TAIL, 0))
        about = counted(len(lines), "line") if whole else f"its last {_MOST_BYTES >> 20} MiB"
        found.append({"name": path.name, "about": about, "pieces": [piece for piece in pieces if piece["text"]]})
    return found


def _lines(path: Path) -> tuple[list[str], bool]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MOST_BYTES))
            return file.read(_MOST_BYTES).decode(errors="replace").splitlines(), size <= _MOST_BYTES
    except OSError:
        return [], True


def _places(run: Record, lines: Sequence[str]) -> Iterator[tuple[Landing, int]]:
    """The lines of the log at which faults happened. The lines have no times, so a line is found by an event that is
    also in the journal: the last step before the fault, the death of a process that was hit, or a known cause."""
    for landing in landings(run):
        steps = [e.data["step"] for e in run.of_kind(Kind.LOG_STEP) if e.mono_s <= landing.at_s]
        begin = _nth(lines, steps[-1], steps.count(steps[-1])) if steps else None
        words = [f"(pid: {pid})" for pid in sorted(landing.pids)]
        words += [str(e.data["line"])[:80] for e in run.of_kind(Kind.LOG_CAUSE) if e.mono_s >= landing.at_s][:1]
        later = range(begin or 0, len(lines))
        place = next((n for n in later if any(word in lines[n] for word in words)), begin)
        if place is not None:
            yield landing, place


def _nth(lines: Sequence[str], step: object, count: int) -> int | None:
    """The index of the line that mentions the step for the `count`-th time: a log mentions a step again after a resume.
    None if there is no such line."""
    wanted = re.compile(rf"(?i)(?:step|iter(?:ation)?)\D{{0,12}}0*{step}\b")
    found = [n for n, line in enumerate(lines) if wanted.search(line)]
    return found[min(count, len(found)) - 1] if found else None


def _piece(title: str, lines: Sequence[str], place: int, before: int, after: int) -> dict[str, Any]:
    first = max(0, place - before)
    some = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} […]" for line in lines[first : place + after + 1]]
    return {"title": title, "first": first + 1, "mark": place - first, "text": "\n".join(some)}


def hangs_of(run: Record) -> list[dict[str, Any]]:
    """Each hang that was declared: which observers noticed it, which ranks they blamed, and why."""
    start = run.events[0].mono_s if run.events else 0.0
    return [
        {
            "at": round(event.mono_s - start, 2), "since": round(float(event.data["since_s"]) - start, 2),
            "observers": event.data["observers"], "culprits": event.data.get("culprits", event.data["ranks"]),
            "suspects": event.data.get("suspects", []), "confidence": event.data.get("confidence", ""),
            "summary": event.data.get("summary", ""), "evidence": event.data.get("evidence", {}),
        }
        for event in run.of_kind(Kind.HANG_DECLARED)
    ]  # fmt: skip


def stamps_of(folder: RunDir) -> list[list[Stamp]]:
    return collective_stamps.read_folder(folder.stamps) if folder.stamps.is_dir() else []


def dumps_of(folder: RunDir) -> list[dict[str, Any]]:
    """The last collectives of each rank, from Flight Recorder dumps in the job's own folder."""
    homes = sorted({path.parent for path in _below(folder.job) if _DUMP.search(path.name)})
    return [dump for home in homes[:4] if (dump := _dump(home, folder.job))]


def _below(root: Path) -> Iterator[Path]:
    """The files at most three levels below the folder. Deeper levels are left out, because a checkpoint folder may hold
    very many files."""
    for depth in range(1, 4):
        yield from (path for _, path in zip(range(2000), root.glob("/".join("*" * depth)), strict=False))


def _dump(home: Path, root: Path) -> dict[str, Any] | None:
    try:
        calls = flight_recorder.read_folder(home)
    except (UsageError, OSError, ValueError):
        return None
    ranks = [
        {"rank": rank, "calls": [_call(call) for call in one.calls[-_MOST_CALLS:]]}
        for rank, one in sorted(calls.ranks.items())[:_MOST_FILES]
    ]
    return {"folder": str(home.relative_to(root)), "ranks": ranks, "problems": list(calls.problems)[:10]}


def _call(call: Call) -> str:
    state = "over" if call.done else "started" if call.started else "not over"
    where = f", {call.where}" if call.where else ""
    return f"{call.op} no. {call.seq} of group {call.group or '?'}: {state}{where}"
