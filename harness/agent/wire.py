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
    """Every kind of event there is; `FIELDS` gives the payload of each."""

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


# The keys that every payload of a kind has; writers refuse a payload that lacks one, readers bear with
# keys that they don't know. Times are seconds, sizes bytes.
FIELDS: Mapping[Kind, frozenset[str]] = {
    Kind.STAGE: frozenset({"stage"}),  # the harness goes on to this part of its work
    Kind.NOTE: frozenset({"text"}),  # shown with the verdict
    Kind.STOPPED: frozenset({"reason"}),  # + interrupted: by somebody outside; enough: on purpose
    Kind.PROBED: frozenset({"probe", "holds"}),  # of a condition that looks at something; + reason
    Kind.JOB_STARTED: frozenset({"submission", "pid"}),  # the command was started, by its own pid
    Kind.JOB_EXITED: frozenset({"submission", "pid", "exit_code"}),  # negative: signal; None: unknown
    # Of a job on several nodes: each node's command; the job itself exits with the last of them.
    Kind.NODE_STARTED: frozenset({"submission", "node", "pid"}),
    Kind.NODE_EXITED: frozenset({"submission", "node", "pid", "exit_code"}),  # likewise
    # Seconds that make the node's CLOCK_MONOTONIC that of node 0, and how far that may be off.
    Kind.CLOCK: frozenset({"node", "offset_s", "error_s"}),
    Kind.LOG_STEP: frozenset({"step", "adapter"}),  # + loss, lr
    Kind.LOG_CAUSE: frozenset({"cause", "line"}),  # a known failure of torch, gloo or NCCL; + advice
    Kind.ELASTIC_WORKER: frozenset({"state", "pid"}),  # START, SUCCEEDED, FAILED; + local_rank
    Kind.ELASTIC_FAILURE: frozenset({"exit_code", "local_rank", "pid"}),  # torchelastic says that this worker failed
    Kind.ELASTIC_TEARDOWN: frozenset({"pid", "signal"}),  # torchelastic ends a worker with this signal
    Kind.ELASTIC_RENDEZVOUS: frozenset({"done"}),  # begun, or done
    Kind.ELASTIC_RESTART: frozenset({"attempts_left"}),  # torchelastic starts the workers again
    Kind.RANK_UP: frozenset({"pid", "start_ticks", "local_rank", "world_size", "node"}),  # it was seen to live; + gpu
    Kind.RANK_STATE: frozenset({"pid", "state"}),  # state: the letter of /proc/PID/stat
    Kind.RANK_EXITED: frozenset({"pid", "start_ticks", "exit_code"}),  # negative: signal; None: unknown
    # + group: the address of the store that torchelastic gave to all ranks of one rendezvous
    Kind.AGENT_STARTED: frozenset({"pid", "start_ticks", "local_rank", "world_size", "python", "torch", "hooks"}),
    Kind.AGENT_FAILED: frozenset({"hook", "error"}),  # an error in a hook switched it off; the job goes on
    Kind.AGENT_ENDED: frozenset({"unseen"}),  # hooks that were installed and never fired
    # losses: one float (or None: not copied yet) per backward; samples: a digest per row that was trained
    # on, None where nothing could be seen; indices: of the same batches, None where there are none;
    # lr: one per parameter group; opt_step: the optimizer's own counter; sched_step: the scheduler's;
    # phases: seconds by phase; skipped: the optimizer step was skipped (GradScaler)
    Kind.STEP: frozenset({"losses", "samples", "indices", "lr", "opt_step", "sched_step", "phases", "skipped"}),
    Kind.LOSS: frozenset({"losses"}),  # late values of the step in the envelope (asynchronous copies)
    Kind.SAVE_BEGIN: frozenset({"path", "format"}),  # format: torch, dcp, safetensors
    Kind.SAVE_END: frozenset({"path", "format", "ok", "blocked_s"}),  # blocked_s: how long training stood still for it
    # As a save begins: of each parameter its type and shape, and its check sum on this rank (check_sums.py), by name.
    Kind.KEPT: frozenset({"parameters"}),
    Kind.RENAMED: frozenset({"path", "to"}),  # what this rank saved, or the folder that it is in, gets this name
    Kind.LOAD_BEGIN: frozenset({"path", "format"}),  # as a save
    Kind.LOAD_END: frozenset({"path", "format", "ok", "numbers"}),  # numbers: step-like entries found
    Kind.ARMED: frozenset({"fault", "targets"}),  # the agents have it; targets: ranks
    Kind.HELD: frozenset({"fault", "phase", "global_step"}),  # the pacer waits at the Moment
    Kind.APPLYING: frozenset({"fault", "phase", "global_step", "pid"}),  # the fault is about to act, here
    Kind.APPLIED: frozenset({"fault"}),  # it has acted
    Kind.ROLLED_BACK: frozenset({"fault", "verified"}),  # it was taken back, and whether that was verified; + reason
    Kind.MISSED: frozenset({"fault", "reason"}),  # it did not land, and why; + ended_before: the run's end came first
    Kind.EFFECT: frozenset({"fault", "effect"}),  # what an injector saw of its own fault; + node: where it was felt
    # What the kernel has counted on the job's own connections since the fault was applied, and round trips in ms.
    # + measured: what a probe connection saw, by the names of what was asked for
    Kind.NETWORK: frozenset({"fault", "counts"}),
    Kind.CONTAINER: frozenset({"fault", "node", "action"}),  # what the engine has told of a node's container
    Kind.GUARDED: frozenset({"record", "handles"}),  # the reaper has the way back on disk; record: of the undo log
    Kind.HEALED: frozenset({"record", "handle", "verified"}),  # the reaper has taken one handle back
    # By our observers, from outside. ranks: the culprits, as far as they are known; since_s: CLOCK_MONOTONIC
    Kind.HANG_SUSPECTED: frozenset({"observer", "ranks", "since_s"}),
    Kind.HANG_DECLARED: frozenset({"observers", "ranks", "since_s"}),  # + what a diagnosis says
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
