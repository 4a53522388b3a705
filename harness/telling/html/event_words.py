"""A sentence for each event, also for those about which the console says nothing."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.plan import Plan
from torchaos.harness.telling.terminal.narrator import Narrator, exit_in_words
from torchaos.harness.telling.terminal.text import on_one_line

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
    Kind.HANG_OPINION: lambda e: f"the observer {e.data['observer']}: {e.data['opinion']}; {e.data['detail']}",
    Kind.WRITER_ENDED: lambda e: f"{_who(e)}: the process that saved has ended (pid {e.data['child']})",
}
