"""What the agent and the harness agree on: the names of the environment, and events. `plan`, `page` and `quantities`
are of the same kind.

Both sides read this very file, and the agent may run under a Python that has nothing of ours installed,
so it imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, Mapping

VERSION = 1

# The job's environment carries these names; nothing else of ours goes in.
ENV_PLAN = "TORCHAOS_PLAN"  # path of the agent's plan; its absence keeps the agent out
ENV_RUN_ID = "TORCHAOS_RUN_ID"  # marks every process of one run, so that orphans are found by it
ENV_ATTEMPT_BASE = "TORCHAOS_ATTEMPT_BASE"  # attempts that earlier submissions used up
ENV_NODE = "TORCHAOS_NODE"  # index of the node, where the launcher has several
ENV_REPLICA = "TORCHAOS_REPLICA"  # index of the replica, where the job is several torchruns side by side
ENV_ROUND = "TORCHAOS_ROUND"  # of the rendezvous that a rank came out of; set by agent/rounds.py
ENV_ARMED = "TORCHAOS_ARMED"  # pid of the armed rank process; its children inherit it and stay unarmed


class Phase(str, Enum):
    """What a rank's host code is doing (the GPU may be elsewhere)."""

    START = "start"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    OPTIMIZER = "optimizer"
    CHECKPOINT_WRITE = "checkpoint_write"
    CHECKPOINT_WRITTEN = "checkpoint_written"
    CHECKPOINT_LOAD = "checkpoint_load"


class Kind(str, Enum):
    """Every kind of event there is; `PAYLOADS` gives the payload of each."""

    STAGE = "run.stage"
    NOTE = "run.note"
    STOPPED = "run.stopped"
    PROBED = "run.probed"
    JOB_STARTED = "job.started"
    JOB_EXITED = "job.exited"
    NODE_STARTED = "node.started"
    NODE_EXITED = "node.exited"
    CLOCK = "clock.offset"
    LOG_STEP = "log.step"
    LOG_CAUSE = "log.cause"
    ELASTIC_WORKER = "elastic.worker"
    ELASTIC_FAILURE = "elastic.failure"
    ELASTIC_TEARDOWN = "elastic.teardown"
    ELASTIC_RENDEZVOUS = "elastic.rendezvous"
    ELASTIC_RESTART = "elastic.restart"
    RANK_UP = "rank.up"
    RANK_STATE = "rank.state"
    RANK_EXITED = "rank.exited"
    AGENT_STARTED = "agent.started"
    AGENT_FAILED = "agent.failed"
    AGENT_ENDED = "agent.ended"
    STEP = "step"
    LOSS = "loss"
    SAVE_BEGIN = "checkpoint.save_begin"
    SAVE_END = "checkpoint.save_end"
    KEPT = "checkpoint.parameters"
    RENAMED = "checkpoint.renamed"
    LOAD_BEGIN = "checkpoint.load_begin"
    LOAD_END = "checkpoint.load_end"
    ARMED = "fault.armed"
    HELD = "fault.held"
    APPLYING = "fault.applying"
    APPLIED = "fault.applied"
    ROLLED_BACK = "fault.rolled_back"
    MISSED = "fault.missed"
    EFFECT = "fault.effect"
    NETWORK = "network.sample"
    CONTAINER = "container.event"
    GUARDED = "undo.guarded"
    HEALED = "undo.healed"
    HANG_SUSPECTED = "hang.suspected"
    HANG_DECLARED = "hang.declared"


_FLOATS = "list[float | None] | None"
_HIT = {"fault": "str", "phase": "str | None", "global_step": "Whole | None"}
_RANK = {"pid": "Whole", "start_ticks": "Whole | None", "local_rank": "Whole | None", "world_size": "Whole | None"}

# What each kind of event says: its keys, and the types of their values by the names that `record/events/payloads.py`
# explains (`Whole` is an integer of 64 bits). A key with a question mark may be missing. Writers refuse a payload that
# lacks a key; readers refuse values of other types, and accept keys that they do not know. Times are in seconds, sizes
# in bytes.
PAYLOADS: Mapping[Kind, Mapping[str, str]] = {
    Kind.STAGE: {"stage": "str"},  # the harness goes on to this part of its work
    Kind.NOTE: {"text": "str"},  # shown with the verdict
    # interrupted: by somebody outside; enough: on purpose
    Kind.STOPPED: {"reason": "str", "interrupted?": "bool", "enough?": "bool"},
    Kind.PROBED: {"probe": "str", "holds": "bool"},  # of a condition that looks at something; + reason
    Kind.JOB_STARTED: {"submission": "Whole", "pid": "Whole"},  # the command was started, by its own pid
    # exit_code: negative: signal; None: unknown
    Kind.JOB_EXITED: {"submission": "Whole", "pid": "Whole", "exit_code": "Whole | None"},
    # Of a job on several nodes: each node's command; the job itself exits with the last of them.
    Kind.NODE_STARTED: {"submission": "Whole", "node": "Whole", "pid": "Whole"},
    Kind.NODE_EXITED: {"submission": "Whole", "node": "Whole", "pid": "Whole", "exit_code": "Whole | None"},  # likewise
    # Seconds that make the node's CLOCK_MONOTONIC that of node 0, and how far that may be off.
    Kind.CLOCK: {"node": "Whole", "offset_s": "float", "error_s": "float"},
    # the job's own log reports a step
    Kind.LOG_STEP: {"step": "Whole | None", "adapter": "str", "loss?": "float | None", "lr?": "float | None"},
    Kind.LOG_CAUSE: {"cause": "str", "line": "str", "advice?": "str"},  # a known failure of torch, gloo or NCCL
    Kind.ELASTIC_WORKER: {"state": "str", "pid": "Whole", "local_rank?": "Whole | None"},  # START, SUCCEEDED, FAILED
    # torchelastic says that this worker failed
    Kind.ELASTIC_FAILURE: {"exit_code": "Whole | None", "local_rank": "Whole | None", "pid": "Whole"},
    # torchelastic ends a worker with this signal
    Kind.ELASTIC_TEARDOWN: {"pid": "Whole", "signal": "str", "local_rank?": "Whole | None"},
    Kind.ELASTIC_RENDEZVOUS: {"done": "bool"},  # begun, or done
    Kind.ELASTIC_RESTART: {"attempts_left": "Whole | None"},  # torchelastic starts the workers again
    # it was seen to live; + gpu. inner_pid: its pid as the rank itself knows it, in a container
    Kind.RANK_UP: {**_RANK, "node": "Whole | None", "inner_pid?": "Whole"},
    Kind.RANK_STATE: {"pid": "Whole", "state": "str"},  # state: the letter of /proc/PID/stat
    # exit_code: negative: signal; None: unknown
    Kind.RANK_EXITED: {"pid": "Whole", "start_ticks": "Whole | None", "exit_code": "Whole | None"},
    # group: the address of the store that torchelastic gave to all ranks of one rendezvous
    Kind.AGENT_STARTED: {**_RANK, "python": "str", "torch": "str | None", "hooks": "list[str]", "group?": "str",
                         "node?": "Whole | None"},
    Kind.AGENT_FAILED: {"hook": "str", "error": "str"},  # an error in a hook switched it off; the job goes on
    Kind.AGENT_ENDED: {"unseen": "list[str]"},  # hooks that were installed and never fired
    # losses: one float (or None: not copied yet) per backward; samples: a digest per row that was trained
    # on, None where nothing could be seen; indices: of the same batches, None where there are none;
    # lr: one per parameter group; opt_step: the optimizer's own counter; sched_step: the scheduler's;
    # phases: seconds by phase; skipped: the optimizer step was skipped (GradScaler)
    Kind.STEP: {
        "losses": _FLOATS, "samples": "list[str | float | None] | None", "indices": "Any", "lr": _FLOATS,
        "opt_step": "float | None", "sched_step": "float | None", "phases": "dict[str, float]",
        "skipped": "bool | None",
    },
    Kind.LOSS: {"losses": _FLOATS},  # late values of the step in the envelope (asynchronous copies)
    Kind.SAVE_BEGIN: {"path": "str", "format": "str"},  # format: torch, dcp, safetensors
    # blocked_s: how long training stood still for it
    Kind.SAVE_END: {"path": "str", "format": "str", "ok": "bool", "blocked_s": "float"},
    # As a save begins: of each parameter its type and shape, and its check sum on this rank (check_sums.py), by name.
    Kind.KEPT: {"parameters": "dict[str, KindAndSum]"},
    Kind.RENAMED: {"path": "str", "to": "str"},  # what this rank saved, or the folder that it is in, gets this name
    Kind.LOAD_BEGIN: {"path": "str", "format": "str"},  # as a save
    # numbers: step-like entries found
    Kind.LOAD_END: {"path": "str", "format": "str", "ok": "bool", "numbers": "dict", "blocked_s?": "float"},
    Kind.ARMED: {"fault": "str", "targets": "list[Whole]"},  # the agents have it; targets: ranks
    Kind.HELD: {**_HIT, "pid?": "Whole | None"},  # the pacer waits at the Moment
    Kind.APPLYING: {**_HIT, "pid": "Whole | None"},  # the fault is about to act, here
    Kind.APPLIED: {"fault": "str"},  # it has acted
    # it was taken back, and whether that was verified
    Kind.ROLLED_BACK: {"fault": "str", "verified": "bool", "reason?": "str | None"},
    # it did not land, and why; + ended_before: the run's end came first
    Kind.MISSED: {"fault": "str", "reason": "str"},
    Kind.EFFECT: {"fault": "str", "effect": "str"},  # what an injector saw of its own fault; + node: where it was felt
    # What the kernel has counted on the job's own connections since the fault was applied, and round trips in ms.
    # measured: what a probe connection saw, by the names of what was asked for
    Kind.NETWORK: {"fault": "str", "counts": "dict[str, float]", "measured?": "dict[str, float]"},
    # what the engine has told of a node's container
    Kind.CONTAINER: {"fault": "str", "node": "Whole", "action": "str"},
    # the reaper has the way back on disk; record: of the undo log
    Kind.GUARDED: {"record": "str", "handles": "list[str]", "why?": "str | None"},
    # the reaper has taken one handle back
    Kind.HEALED: {"record": "str", "handle": "dict", "verified": "bool", "fault?": "str", "reason?": "str | None"},
    # By our observers, from outside. ranks: the culprits, as far as they are known; since_s: CLOCK_MONOTONIC
    Kind.HANG_SUSPECTED: {"observer": "str", "ranks": "list[Whole]", "since_s": "float"},
    # + what a diagnosis says
    Kind.HANG_DECLARED: {"observers": "list[str]", "ranks": "list[Whole]", "since_s": "float"},
}  # fmt: skip

# The keys that every payload of a kind has.
FIELDS: Mapping[Kind, frozenset[str]] = {
    kind: frozenset(key for key in keys if not key.endswith("?")) for kind, keys in PAYLOADS.items()
}


_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Event:
    """One line of a journal file. `step` counts within the attempt; only `history` makes global steps."""

    kind: Kind
    source: str
    seq: int
    wall_s: float  # seconds since the epoch
    mono_s: float  # CLOCK_MONOTONIC, comparable within one node
    rank: int | None = None
    attempt: int | None = None
    step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        # By hand: dataclasses.asdict copies the payload deeply, which takes longer than all the rest of a step's event.
        return _encode({**self.__dict__, "kind": self.kind.value}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes | str) -> Event:
        """Raises ValueError where the line is torn or of a kind that this version does not know."""
        raw = json.loads(line)
        if not isinstance(raw, dict):
            raise ValueError("an event is a JSON object")
        try:
            known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
            return cls(**{**known, "kind": Kind(raw["kind"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an event: {error}") from error


class EventFile:
    """The one writer of one journal file. Each event is a single write(2), so it survives SIGKILL."""

    def __init__(self, path: Path, source: str, rank: int | None = None, attempt: int | None = None) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._source, self._rank, self._attempt = source, rank, attempt
        self._seq = count()  # one C call, so that threads and signal handlers never get the same number

    def emit(
        self, kind: Kind, data: Mapping[str, Any], *, step: int | None = None,
        rank: int | None = None, attempt: int | None = None, mono_s: float | None = None,
    ) -> Event:  # fmt: skip
        """Write one event; raises ValueError when the payload lacks a key of its kind."""
        if not FIELDS[kind] <= data.keys():
            missing = FIELDS[kind] - data.keys()
            raise ValueError(f"{kind.value} needs {', '.join(sorted(missing))}")
        event = Event(
            kind, self._source, next(self._seq), time.time(), time.monotonic() if mono_s is None else mono_s,
            self._rank if rank is None else rank, self._attempt if attempt is None else attempt, step, dict(data),
        )  # fmt: skip
        os.write(self._fd, event.to_line())
        return event

    def close(self) -> None:
        os.close(self._fd)


def rank_of(environ: Mapping[str, str]) -> int:
    """The number of a rank in the whole job. The torchrun of each replica counts its ranks from 0; they are numbered
    one replica after the other, as torchft does (`_global_rank` in its manager.py). Raises KeyError, ValueError."""
    return int(environ.get(ENV_REPLICA, "0")) * int(environ.get("WORLD_SIZE", "0")) + int(environ["RANK"])


def attempt_of(environ: Mapping[str, str]) -> int:
    """The attempt that a rank belongs to. On several nodes it is counted by rounds of the rendezvous: each torchelastic
    agent counts only the restarts that it made itself. Raises ValueError for what is no number."""
    base = int(environ.get(ENV_ATTEMPT_BASE, "0"))
    return base + int(environ.get(ENV_ROUND) or environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), field 22); with the pid it names a process for
    good. None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
