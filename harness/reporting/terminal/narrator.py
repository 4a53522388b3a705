"""Turns events into sentences during a run. It remembers which events it has reported."""

from __future__ import annotations

import posixpath
import signal
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torchaos.harness.analysis.hangs import ranks_in_words
from torchaos.harness.monitoring.probes.known_failures import BY_NAME
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import Plan, target_in_words
from torchaos.harness.reporting.terminal.text import on_one_line, shortened

_STAGES = {
    "prepare": "", "run": "", "end": "", "launch": "starting the job", "collect": "collecting the evidence",
    "heal": "rolling back", "stop job": "ending the rest of the job", "inventory": "reading the checkpoints",
}  # fmt: skip
_EACH = 8  # the most lines about single ranks in an attempt


class Line(NamedTuple):
    text: str
    style: str = ""


class Narrator:
    def __init__(self, plan: Plan) -> None:
        self._faults = {fault.id: fault for fault in plan.faults}
        self._told: set[object] = set()
        self._up: dict[int, set[int]] = {}
        self._ended: dict[int, int] = {}
        self._tell: Mapping[Kind, Callable[[Event], Line | None]] = {
            Kind.STAGE: lambda e: self._stage(str(e.data["stage"])),
            Kind.NOTE: self._note,
            Kind.STOPPED: lambda e: Line(f"the run is ended early: {e.data['reason']}", "bold yellow"),
            Kind.JOB_STARTED: self._job_started,
            Kind.JOB_EXITED: lambda e: Line(_end_in_words(e.data["exit_code"])),
            Kind.RANK_UP: self._rank_up,
            Kind.RANK_EXITED: self._rank_exited,
            Kind.ELASTIC_FAILURE: self._elastic_failure,
            Kind.ELASTIC_RESTART: lambda e: Line(_restart_in_words(e.data["attempts_left"])),
            Kind.LOG_CAUSE: self._recognised,
            Kind.AGENT_FAILED: self._agent_failed,
            Kind.STEP: self._first_step,
            Kind.SAVE_END: self._saved,
            Kind.LOAD_END: self._loaded,
            Kind.ARMED: lambda e: Line(f"{self._fault(e)} is armed"),
            Kind.HELD: lambda e: Line(f"rank {e.rank} is held for {self._fault(e)}{_where(e)}"),
            Kind.APPLYING: self._applying,
            Kind.APPLIED: self._applied,
            Kind.MISSED: lambda e: Line(f"{self._fault(e)} missed: {e.data['reason']}", "yellow"),
            Kind.EFFECT: lambda e: Line(f"{self._fault(e)}: {e.data['effect']}"),
            Kind.GPU_EVENT: lambda e: Line(f"GPU {e.data['gpu']}, node {e.data['node']}: {e.data['event']}", "yellow"),
            Kind.HANG_SUSPECTED: lambda e: Line(f"{e.data['observer']} suspects a hang", "yellow"),
            Kind.HANG_DECLARED: lambda e: Line(f"the job hangs; {e.data.get('summary', '')}", "bold yellow"),
            Kind.HANG_AT_END: lambda e: Line(f"at the end, {ranks_in_words(e.data['ranks']) or 'no rank is alive'}"),
            Kind.GUARDED: self._guarded,
            Kind.ROLLED_BACK: lambda e: self._rolled_back(e, self._fault(e)),
            Kind.HEALED: lambda e: None if e.data["verified"] else self._rolled_back(e, str(e.data["record"])),
        }  # fmt: skip

    def tell(self, event: Event) -> Line | None:
        """One line about the event, safe to print. None if the event gets no line."""
        teller = self._tell.get(event.kind)
        line = teller(event) if teller else None
        return line and Line(shortened(on_one_line(line.text), 400), line.style)

    def _stage(self, stage: str) -> Line | None:
        words = _STAGES.get(stage, stage)
        return Line(words, "dim") if words else None

    def _note(self, event: Event) -> Line | None:
        if "norm" not in event.data:
            return Line(f"note: {event.data['text']}")
        # There may be one for each backward; the report says how many there were.
        return self._once(("norm", event.attempt), Line(f"note: rank {event.rank}: {event.data['text']}"))

    def _job_started(self, event: Event) -> Line:
        again = event.data["submission"]
        return Line(
            f"the job is submitted again, the {again}. time" if again else f"the job runs as pid {event.data['pid']}"
        )

    def _rank_up(self, event: Event) -> Line | None:
        up = self._up.setdefault(event.attempt or 0, set())
        up.add(event.rank or 0)
        world = int(event.data["world_size"])
        return (
            self._once(("up", event.attempt), Line(f"attempt {event.attempt or 0}: {world} of {world} ranks are up"))
            if len(up) >= world
            else None
        )

    def _rank_exited(self, event: Event) -> Line | None:
        code = event.data["exit_code"]
        if code == 0 or not self._one_more(event.attempt):
            return None
        return Line(f"rank {event.rank} is gone (pid {event.data['pid']}): {exit_in_words(code)}", "red")

    def _elastic_failure(self, event: Event) -> Line | None:
        if not self._one_more(event.attempt):
            return None
        who = f"rank {event.rank}" if event.rank is not None else f"local rank {event.data['local_rank']}"
        return Line(f"torchelastic sees that {who} failed: {exit_in_words(event.data['exit_code'])}")

    def _first_step(self, event: Event) -> Line | None:
        return self._once(("step", event.attempt), Line(f"attempt {event.attempt or 0}: the first step is done"))

    def _agent_failed(self, event: Event) -> Line | None:
        line = Line(
            f"the agent's hook {event.data['hook']} failed and was switched off: {event.data['error']}", "yellow"
        )
        return self._once(("agent", event.data["hook"]), line)

    def _saved(self, event: Event) -> Line | None:
        return None if event.data["ok"] else Line(f"rank {event.rank} could not save {_name(event)}", "yellow")

    def _loaded(self, event: Event) -> Line | None:
        if event.data.get("missing"):
            line = Line(f"attempt {event.attempt or 0}: looked for {_name(event)}, which does not exist")
            return self._once(("missing", event.attempt, _name(event)), line)
        if not event.data["ok"]:
            return Line(f"rank {event.rank} could not load {_name(event)}", "yellow")
        return self._once(("load", event.attempt), Line(f"attempt {event.attempt or 0}: loaded {_name(event)}"))

    def _applying(self, event: Event) -> Line:
        self._told.add(("applied", event.data["fault"]))
        pid, node = event.data["pid"], event.data.get("node")
        who = f"rank {event.rank}" if event.rank is not None else f"pid {pid}" if pid else f"node {node}"
        if event.rank is None and not pid and node is None:
            fault = self._faults.get(str(event.data["fault"]))
            who = target_in_words(fault.target, fault.params.get("endpoint")) if fault else "files"
        return Line(f"{self._fault(event)} hits {who}{_where(event)}", "bold yellow")

    def _applied(self, event: Event) -> Line | None:
        return self._once(("applied", event.data["fault"]), Line(f"{self._fault(event)} is applied", "bold yellow"))

    def _guarded(self, event: Event) -> None:
        if event.data.get("why"):
            self._told.add(("for good", event.data["record"]))

    def _rolled_back(self, event: Event, subject: str) -> Line | None:
        if event.data["verified"]:
            if ("for good", event.data.get("fault")) in self._told:
                return None  # such as a kill: there was nothing to roll back
            return Line(f"{subject} is rolled back, and verified")
        return Line(
            f"{subject} is NOT rolled back: {event.data.get('reason') or 'it could not be verified'}", "bold red"
        )

    def _fault(self, event: Event) -> str:
        name = str(event.data["fault"])
        fault = self._faults.get(name)
        return f"{fault.inject} ({name})" if fault and fault.inject != name else name

    def _recognised(self, event: Event) -> Line | None:
        name = str(event.data["cause"])
        known = BY_NAME.get(name)
        if known and known.is_consequence:  # ranks also leave each other at a healthy end
            return None
        return self._once(("cause", name), Line(f"recognised: {name}"))

    def _once(self, key: object, line: Line) -> Line | None:
        if key in self._told:
            return None
        self._told.add(key)
        return line

    def _one_more(self, attempt: int | None) -> bool:
        self._ended[attempt or 0] = self._ended.get(attempt or 0, 0) + 1
        return self._ended[attempt or 0] <= _EACH


def _where(event: Event) -> str:
    step, phase = event.data.get("global_step"), event.data.get("phase")
    parts = [f"step {step}" if step is not None else "", str(phase).replace("_", " ") if phase else ""]
    return f" in {told}" if (told := ", ".join(part for part in parts if part)) else ""


def _name(event: Event) -> str:
    return posixpath.basename(str(event.data["path"]).rstrip("/")) or "a checkpoint"


def _end_in_words(code: object) -> str:
    if code is None:  # for example, of a job to which torchaos is attached
        return "the job ended, or is no longer followed; its exit code is not known"
    return f"the job {'was' if isinstance(code, int) and code < 0 else 'ended with'} {exit_in_words(code)}"


def _restart_in_words(left: object) -> str:
    if left is None:
        return "torchelastic restarts"
    return f"torchelastic restarts; {left or 'no'} {'restart is' if left == 1 else 'restarts are'} left"


def exit_in_words(code: object) -> str:
    """An exit code; negative: of a signal; None: not seen."""
    if code is None:
        return "no exit code was seen"
    if isinstance(code, int) and code < 0:
        known = {Signal.value: Signal.name for Signal in signal.Signals}
        return f"killed by {known.get(-code, f'signal {-code}')}"
    return f"exit code {code}"
