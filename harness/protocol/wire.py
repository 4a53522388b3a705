"""The names of environment variables, the events that the agent and the harness write and read, and the files that a
rank writes beside its events. Standard library only, because the agent may run in a Python without torchaos.

The manifest of a save has digests of everything that the save wrote, chunk by chunk. They are made from the bytes in
memory, because the file may already be damaged when it is read. A manifest is a JSON file in the run directory, one for
each save and rank. agent/saving/manifest_writer.py decides when manifests are made.

`spans` has entries (offset, length, digests), with one digest in hexadecimal for each CHUNK bytes:

- 16 digits: xxh3 of the memory.
- 24 digits: xxh3 and then CRC-32, for formats that keep no CRC. From the CRC-32, a flipped bit can be located. It takes
  several times as long as xxh3, so it is computed later, in the background, from the file. It is added only if every
  xxh3 of the file is still that of the memory.
- 8 digits: CRC-32 of the memory, if the job's Python has no xxhash package.

A file without spans was saved, but its process ended before the digests were written."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from . import packed_lines

if TYPE_CHECKING:
    from .check_sums import Sums


VERSION = 1

# These are the only variables of torchaos in the job's environment.
ENV_PLAN = "TORCHAOS_PLAN"  # path of the agent's plan; without it the agent does not start
ENV_RUN_ID = "TORCHAOS_RUN_ID"  # marks every process of one run, so that orphans can be found
ENV_ATTEMPT_BASE = "TORCHAOS_ATTEMPT_BASE"  # the number of attempts of earlier submissions and torchruns
ENV_NODE = "TORCHAOS_NODE"  # index of the node, if the launcher has several nodes
ENV_REPLICA = "TORCHAOS_REPLICA"  # index of the replica, if the job is several torchruns side by side
ENV_ROUND = "TORCHAOS_ROUND"  # round of the rendezvous that started a rank; set by agent/startup.py
ENV_STORE = "TORCHAOS_STORE"  # the folder whose files are the objects of the job's S3 store
ENV_AGENT_PID = "TORCHAOS_ARMED"  # pid of the process with the agent; children inherit it, so that they start none


class Phase(str, Enum):
    """The part of a step in which a rank's host code is. The GPU may be in another part."""

    __hash__ = str.__hash__  # the hash of Enum is a slow Python function, and each step looks up phases many times

    START = "start"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    OPTIMIZER = "optimizer"
    CHECKPOINT_WRITE = "checkpoint_write"
    CHECKPOINT_WRITTEN = "checkpoint_written"
    CHECKPOINT_LOAD = "checkpoint_load"
    NEW_EPOCH = "new_epoch"


class Kind(str, Enum):
    """Every kind of event. `PAYLOADS` has the keys of each payload."""

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
    TORCHRUN = "elastic.torchrun"
    RANK_UP = "rank.up"
    RANK_STATE = "rank.state"
    RANK_EXITED = "rank.exited"
    AGENT_STARTED = "agent.started"
    GROUP_JOINED = "agent.group_joined"
    AGENT_FAILED = "agent.failed"
    AGENT_ENDED = "agent.ended"
    STEP = "step"
    LOSS = "loss"
    AHEAD = "optimizer.ahead"
    SAVE_BEGIN = "checkpoint.save_begin"
    SAVE_END = "checkpoint.save_end"
    KEPT = "checkpoint.parameters"
    BEGUN = "state.begun"
    RENAMED = "checkpoint.renamed"
    REMOVED = "checkpoint.removed"
    WRITER_ENDED = "checkpoint.writer_ended"
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
    GPU = "gpu.sample"
    GPU_EVENT = "gpu.event"
    HANG_OPINION = "hang.opinion"
    HANG_SUSPECTED = "hang.suspected"
    HANG_DECLARED = "hang.declared"
    HANG_AT_END = "hang.at_end"


_FLOATS = "list[float | None] | None"
_HIT = {"fault": "str", "phase": "str | None", "global_step": "Whole | None"}
_GPU = {"node": "Whole", "ranks": "list[Whole]"}
# frozen: parameters that are not trained; moments: the state of optimizers, as in `0.weight/exp_avg`; unsaved: buffers
# that are in no state_dict; rng: a digest of each random number generator (state_check_sums.py); same: keys that are
# left out because this rank's last event of the kinds KEPT and BEGUN in the same attempt has the same values
_STATE = {
    "frozen?": "dict[str, KindAndSum]", "buffers?": "dict[str, KindAndSum]", "moments?": "dict[str, KindAndSum]",
    "unsaved?": "list[str]", "rng?": "dict[str, str]", "same?": "list[str]",
}  # fmt: skip
_RANK = {"pid": "Whole", "start_ticks": "Whole | None", "local_rank": "Whole | None", "world_size": "Whole | None"}

# The keys of each kind of event, and the types of their values, explained in `record/events/journal.py` (`Whole`: a
# 64-bit integer). A key with a question mark may be missing. Writers refuse a payload that lacks another key.
# Readers refuse values of other types, and accept further keys. Times are in seconds, sizes in bytes.
PAYLOADS: Mapping[Kind, Mapping[str, str]] = {
    Kind.STAGE: {"stage": "str"},  # the harness begins this stage of the run
    # a text that is shown with the verdict. twin: the exit code and the last step of a twin whose job failed by itself
    Kind.NOTE: {"text": "str", "twin?": "list[Whole | None]"},
    # interrupted: by a person or program outside of torchaos; enough: the scenario ended the run on purpose
    Kind.STOPPED: {"reason": "str", "interrupted?": "bool", "enough?": "bool", "timed_out?": "bool"},
    Kind.PROBED: {"probe": "str", "holds": "bool"},  # the answer of a condition's probe; + reason
    Kind.JOB_STARTED: {"submission": "Whole", "pid": "Whole"},  # the command was started; pid: of the command
    # exit_code: negative: signal; None: unknown
    Kind.JOB_EXITED: {"submission": "Whole", "pid": "Whole", "exit_code": "Whole | None"},
    # On several nodes: each node's command. The job exits with the last of them.
    Kind.NODE_STARTED: {"submission": "Whole", "node": "Whole", "pid": "Whole"},
    Kind.NODE_EXITED: {"submission": "Whole", "node": "Whole", "pid": "Whole", "exit_code": "Whole | None"},  # as above
    # Seconds to add to the node's CLOCK_MONOTONIC to get that of node 0, and the largest error of this offset.
    Kind.CLOCK: {"node": "Whole", "offset_s": "float", "error_s": "float"},
    # the job's own log reports a step
    Kind.LOG_STEP: {"step": "Whole | None", "adapter": "str", "loss?": "float | None", "lr?": "float | None"},
    Kind.LOG_CAUSE: {"cause": "str", "line": "str", "advice?": "str"},  # a known failure of torch, gloo or NCCL
    Kind.ELASTIC_WORKER: {"state": "str", "pid": "Whole", "local_rank?": "Whole | None"},  # START, SUCCEEDED, FAILED
    # torchelastic says that this worker failed
    Kind.ELASTIC_FAILURE: {"exit_code": "Whole | None", "local_rank": "Whole | None", "pid": "Whole"},
    # torchelastic ends a worker with this signal
    Kind.ELASTIC_TEARDOWN: {"pid": "Whole", "signal": "str", "local_rank?": "Whole | None"},
    Kind.ELASTIC_RENDEZVOUS: {"done": "bool"},  # a rendezvous has begun, or is done
    Kind.ELASTIC_RESTART: {"attempts_left": "Whole | None"},  # torchelastic starts the workers again
    # a torchrun begins, or has ended successfully; the event's attempt is its first attempt
    Kind.TORCHRUN: {"pid": "Whole", "start_ticks": "Whole | None", "ended": "bool"},
    # a rank was seen alive; + gpu. inner_pid: its pid as the rank itself knows it, in a container
    Kind.RANK_UP: {**_RANK, "node": "Whole | None", "inner_pid?": "Whole"},
    Kind.RANK_STATE: {"pid": "Whole", "state": "str"},  # the letter of /proc/PID/stat, such as T for stopped
    # exit_code: negative: signal; None: unknown
    Kind.RANK_EXITED: {"pid": "Whole", "start_ticks": "Whole | None", "exit_code": "Whole | None"},
    # group: the address of the store that torchelastic gave to all ranks of one rendezvous
    Kind.AGENT_STARTED: {**_RANK, "python": "str", "torch": "str | None", "hooks": "list[str]", "group?": "str",
                         "node?": "Whole | None"},
    # the rank has joined the default process group; blocked_s: seconds in init_process_group
    Kind.GROUP_JOINED: {"blocked_s": "float"},
    Kind.AGENT_FAILED: {"hook": "str", "error": "str"},  # an error switched this hook off; the job goes on
    Kind.AGENT_ENDED: {"unseen": "list[str]"},  # hooks that were installed and never fired
    # losses: a float for each backward (None: not copied yet); samples: a digest for each row that was trained on
    # (None: not seen); indices: dataset indices of the same batches (None: there are none); lr: a rate for each
    # parameter group; opt_step, sched_step: the step counters of the optimizer and the scheduler; phases: seconds by
    # phase; skipped: a GradScaler skipped the optimizer step; dropped: how many times gradients were cleared without an
    # optimizer step since the step before; sums: in place of samples and indices, see check_sums.py
    Kind.STEP: {
        "losses": _FLOATS, "samples": "list[str | float | None] | None", "indices": "Any", "lr": _FLOATS,
        "opt_step": "float | None", "sched_step": "float | None", "phases": "dict[str, float]",
        "skipped": "bool | None", "dropped?": "Whole", "sums?": "Sums",
    },
    # Late values for the step of this event: losses (asynchronous copies), or the state after the step as in STEP, if
    # the job may have had other values in place when the step was seen to be over
    Kind.LOSS: {"losses": _FLOATS, "parameters?": "str", "moments?": "str", "sketch?": _FLOATS},
    # When training begins, the optimizer's own counter is ahead by this many steps, and its state was not restored.
    Kind.AHEAD: {"steps": "Whole"},
    # format: torch, dcp, safetensors; child: the pid of a forked process of the rank, if that process saves
    Kind.SAVE_BEGIN: {"path": "str", "format": "str", "child?": "Whole"},
    # blocked_s: seconds that training waited
    Kind.SAVE_END: {"path": "str", "format": "str", "ok": "bool", "blocked_s": "float", "child?": "Whole"},
    Kind.WRITER_ENDED: {"child": "Whole"},  # a forked process that saved is about to end with exit code 0
    # When a save begins: type and shape of each parameter that torch optimizers train, and its check sum on this rank
    # (check_sums.py), by name; _STATE: the rest of the state
    Kind.KEPT: {"parameters": "dict[str, KindAndSum]", **_STATE},
    # The same, before the first step of a process, and before the first step after each load or save of this rank. at:
    # the phase in which it was read (forward, or backward); inputs: the tensors that the model gets in the forward;
    # drawn: the generators from which the forward drew; modes: "train" or "eval", by the names of modules: of the
    # outermost ones, and of those whose mode is not that of the module around them
    Kind.BEGUN: {"parameters?": "dict[str, KindAndSum]", **_STATE, "at": "str",
                 "inputs?": "dict[str, KindAndSum]", "drawn?": "list[str]", "modes?": "dict[str, str]"},
    Kind.RENAMED: {"path": "str", "to": "str"},  # a path that this rank saved, or a folder above it, is renamed
    Kind.REMOVED: {"path": "str"},  # a path that this rank saved or loaded, or a folder above it, was removed
    Kind.LOAD_BEGIN: {"path": "str", "format": "str"},  # format: as in a save
    # numbers: step counts found in the contents
    # missing: the job looked for a file that does not exist
    Kind.LOAD_END: {"path": "str", "format": "str", "ok": "bool", "numbers": "dict", "blocked_s?": "float",
                    "missing?": "bool"},
    Kind.ARMED: {"fault": "str", "targets": "list[Whole]"},  # the agents may fire the fault; targets: ranks
    Kind.HELD: {**_HIT, "pid?": "Whole | None"},  # the pacer waits at the Moment
    Kind.APPLYING: {**_HIT, "pid": "Whole | None"},  # this process is about to apply the fault
    Kind.APPLIED: {"fault": "str"},  # the fault was applied
    # the fault was undone; verified false: the undo failed, or could not be checked
    Kind.ROLLED_BACK: {"fault": "str", "verified": "bool", "reason?": "str | None"},
    # the fault did not land; ended_before: the run ended first
    Kind.MISSED: {"fault": "str", "reason": "str"},
    Kind.EFFECT: {"fault": "str", "effect": "str"},  # an observation of an injector; + node: where it was made
    # Counters of the kernel for the job's own connections since the fault was applied, and round trips in ms.
    # measured: what a probe connection measured, by name
    Kind.NETWORK: {"fault": "str", "counts": "dict[str, float]", "measured?": "dict[str, float]"},
    # the container engine's report about a node's container
    Kind.CONTAINER: {"fault": "str", "node": "Whole", "action": "str"},
    # the handles of an undo are on disk; record: the id of the fault; why: why it can't be undone
    Kind.GUARDED: {"record": "str", "handles": "list[str]", "why?": "str | None"},
    # the reaper has undone a handle
    Kind.HEALED: {"record": "str", "handle": "dict", "verified": "bool", "fault?": "str", "reason?": "str | None"},
    # What NVML shows of a GPU that ranks use: values by name, with units (host/nvml_reader.py); a value that is not
    # known is left out. gpu: NVML's index; pids: the ranks' processes that the driver lists on it
    Kind.GPU: {**_GPU, "gpu": "Whole", "values": "dict[str, float]", "pids": "list[Whole]"},
    # an Xid, or why the GPU no longer answers; gpu None: the driver did not say which
    Kind.GPU_EVENT: {**_GPU, "gpu": "Whole | None", "event": "str", "xid?": "Whole"},
    # An observer outside the job has changed its opinion to: blind, learning, active, suspects, or hangs. quiet_s: for
    # how long it has seen no activity; bound_s: the quiet_s at which it reports a hang; detail: what it saw, or why it
    # is blind; ranks: the ranks that it names
    Kind.HANG_OPINION: {"observer": "str", "opinion": "str", "quiet_s": "float", "bound_s": "float", "detail": "str",
                        "ranks?": "list[Whole]"},
    # Reported by observers outside the job. ranks: the culprits, if known; since_s: seconds of CLOCK_MONOTONIC
    Kind.HANG_SUSPECTED: {"observer": "str", "ranks": "list[Whole]", "since_s": "float"},
    # + the result of the diagnosis. opinions: of all observers at that time, as in HANG_OPINION
    Kind.HANG_DECLARED: {
        "observers": "list[str]", "ranks": "list[Whole]", "since_s": "float", "opinions?": "list[dict]",
    },
    # The run is about to end a job that did not end by itself. ranks: for each live rank its number (rank), whether it
    # waits (waits), what it does (verb) and where (where), in words, the part of a core that it wants (cores), and its
    # stack (stack); + the result of the diagnosis
    Kind.HANG_AT_END: {"ranks": "list[dict]", "culprits": "list[Whole]", "problems": "list[str]"},
}  # fmt: skip

# The keys that every payload of a kind has.
FIELDS: Mapping[Kind, frozenset[str]] = {
    kind: frozenset(key for key in keys if not key.endswith("?")) for kind, keys in PAYLOADS.items()
}


_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Event:
    """A line of a journal file. `step` counts within the attempt; only `history` makes global steps."""

    kind: Kind
    source: str
    seq: int
    wall_s: float  # seconds since the epoch
    mono_s: float  # seconds of CLOCK_MONOTONIC, comparable within a node
    rank: int | None = None
    attempt: int | None = None
    step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        # dataclasses.asdict is not used: its deep copy of the payload takes longer than the rest of the work.
        return _encode({**self.__dict__, "kind": self.kind.value}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes | str) -> Event:
        """The event in a line. Raises ValueError if the line is torn, or if this version does not know its kind."""
        if packed_lines.is_packed(line):
            return cls(Kind.STEP, **packed_lines.unpack(line.encode() if isinstance(line, str) else line))
        raw = json.loads(line)
        if not isinstance(raw, dict):
            raise ValueError("an event is a JSON object")
        try:
            known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
            return cls(**{**known, "kind": Kind(raw["kind"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an event: {error}") from error


class EventFile:
    """The writer of one journal file. Each event is a single write(2), so it survives SIGKILL, and forked children of
    the process can write to the same file."""

    def __init__(self, path: Path, source: str, rank: int | None = None, attempt: int | None = None) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._source, self._rank, self._attempt = source, rank, attempt
        self._packer = None if rank is None or attempt is None else packed_lines.Packer(source, rank, attempt)
        self._seq = count()  # a single C call, so that threads and signal handlers never get the same number

    def emit(
        self, kind: Kind, data: Mapping[str, Any], *, step: int | None = None,
        rank: int | None = None, attempt: int | None = None, mono_s: float | None = None,
    ) -> Event:  # fmt: skip
        """Writes an event. Raises ValueError if the payload lacks a key of its kind."""
        if not FIELDS[kind] <= data.keys():
            missing = FIELDS[kind] - data.keys()
            raise ValueError(f"{kind.value} needs {', '.join(sorted(missing))}")
        event = Event(
            kind, self._source, next(self._seq), time.time(), time.monotonic() if mono_s is None else mono_s,
            self._rank if rank is None else rank, self._attempt if attempt is None else attempt, step, dict(data),
        )  # fmt: skip
        os.write(self._fd, event.to_line())
        return event

    def emit_step(
        self, step: int, losses: Sequence[float | None], lr: Sequence[float | None], opt_step: int | None,
        sched_step: int | None, skipped: bool | None, samples: bytes | None, indices: Sequence[int] | None,
        phases: Mapping[Phase, float], sums: Sums | None = None,
    ) -> None:  # fmt: skip
        """Writes the event of a usual step. `samples`: packed_lines.ROW bytes for each sample. `sums`: written in place
        of samples and indices."""
        assert self._packer is not None
        seq, wall_s, mono_s = next(self._seq), time.time(), time.monotonic()
        try:
            line = self._packer.line(
                seq, wall_s, mono_s, step, losses, lr, opt_step, sched_step, skipped, samples, indices, phases, sums
            )
        except (struct.error, ValueError, OverflowError):
            data = packed_lines.payload(losses, lr, opt_step, sched_step, skipped, samples, indices, phases, sums)
            line = Event(Kind.STEP, self._source, seq, wall_s, mono_s, self._rank, self._attempt, step, data).to_line()
        os.write(self._fd, line)

    def close(self) -> None:
        os.close(self._fd)


def rank_of(environ: Mapping[str, str]) -> int:
    """The number of the rank in the whole job. The torchrun of each replica counts its ranks from 0, so the ranks of
    the earlier replicas are added, as in torchft (`_global_rank` in its manager.py). Raises KeyError if a variable is
    missing, ValueError if it is no number."""
    return int(environ.get(ENV_REPLICA, "0")) * int(environ.get("WORLD_SIZE", "0")) + int(environ["RANK"])


def attempt_of(environ: Mapping[str, str]) -> int:
    """The attempt to which a rank belongs. If the job has several nodes, this is the round of the rendezvous, because
    each torchelastic agent counts only its own restarts. Raises ValueError if a variable is not a number."""
    base = int(environ.get(ENV_ATTEMPT_BASE, "0"))
    return base + int(environ.get(ENV_ROUND) or environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def start_ticks(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot (proc(5), field 22). Together with the pid it identifies
    the process, because the pid may be used again. None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


# When a rank gets this signal, it writes its Python stacks to `RUN_DIR/agent/stacks/rank<R>-a<attempt>-p<pid>.txt`.
# Real-time signals have no predefined meaning.
STACKS_SIGNAL = signal.SIGRTMAX - 7
STACKS = "stacks"
THREAD = "torchaos"  # name of the agent's threads in the kernel; storage faults spare them
# The letter before each path in the list of files that a rank used. FAILED: later files were not recorded.
READ, LISTED, WRITTEN, FAILED = "r", "l", "w", "!"

MANIFEST_VERSION, MANIFESTS = 1, "manifests"
CHUNK = 1 << 20


def gaps(size: int, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields (begin, end) of each part of a file of `size` bytes that no span covers. `spans`: (offset, length in
    bytes)."""
    at = 0
    for offset, length in sorted(spans):
        if offset > at:
            yield at, offset
        at = max(at, offset + length)
    if at < size:
        yield at, size
