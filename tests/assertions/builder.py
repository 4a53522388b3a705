"""An ideal trainer in a few lines of arithmetic, and the journal of its run: kills, resumes, saves. `broken` names the
state that a resume does not restore: rng, rng1 (of rank 1 alone), optimizer, momentum, sampler, schedule, weights."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchaos.harness.protocol.check_sums import MODULUS, SHARD
from torchaos.harness.protocol.wire import FIELDS, Event, Kind
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record

JOB = PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0, "/job/checkpoints")
PLAN = Plan("made-up", "", 7, JOB, (), ())


@dataclass
class Stream:
    """Random numbers whose whole state is how many were drawn: a copy of it costs nothing."""

    seed: str
    drawn: int = 0

    def digest(self) -> str:
        """Of the state, 16 hexadecimal digits."""
        return hashlib.md5(f"{self.seed}/{self.drawn}".encode()).hexdigest()[:16]

    def random(self) -> float:
        """At least 0 and less than 1."""
        self.drawn += 1
        return int(self.digest()[:12], 16) / 16**12


@dataclass
class State:
    weight: float
    rngs: list[Stream]
    momentum: float = 0.0
    opt_step: int = 0
    sched_step: int = 0
    position: int = 0  # batches drawn


@dataclass
class Trainer:
    """Runs `steps` steps and saves every `every`; each of `kills` (global step, rank) ends an attempt in that step."""

    steps: int = 30
    stops: int | None = None  # after this step, if the job decides to stop before its last
    every: int = 5
    world: int = 2
    batch: int = 4
    kills: Sequence[tuple[int, int]] = ()
    broken: frozenset[str] = frozenset()
    worlds: Mapping[int, int] = field(default_factory=dict)  # world size by attempt, where it changes
    freeze: tuple[int, int, float] | None = None  # step, rank, seconds
    raises: tuple[int, int, float] | None = None  # step, rank, seconds: caught, then loaded again in the same process
    blind: bool = False  # no further step of the rank that raised is seen
    resubmitted: bool = False  # by a scheduler instead of torchelastic
    loads_seen: bool = True
    counters_seen: bool = True
    samples_seen: bool = True
    losses_seen: bool = True
    log_only: int = 0  # no agent: a log line every so many steps
    global_batch: bool = False  # the global batch stays when the world changes
    seed: int = 7
    noise: float = 0.0  # of another machine, say
    save_s: float = 0.05
    apart: int | None = None  # a rank whose parameters are its own after a resume
    parts: bool = False  # every rank holds a part of the parameters
    state_seen: bool = False  # the parameters' check sums and the gradient's norm
    sketched: bool = False  # and the parameters' sketches
    breaks: Sequence[int] = ()  # the attempts whose resume is `broken`; empty: all
    rewinds: Sequence[int] = ()  # attempts that begin from scratch
    off: float = 0.0  # by which part of itself the weight is off after a resume
    rotates: bool = False  # the ranks' parts of a batch, and all that depends on them, with each attempt
    epoch: int = 1 << 30  # batches of all ranks in an epoch
    named: bool = False  # the state with which steps begin, by name, after a resume and after each save
    sharded: bool = False  # as FSDP2: every rank has a part, and the check sums add up
    _events: list[Event] = field(default_factory=list)
    _numbers: Counter[str] = field(default_factory=Counter)  # of events by source
    _now: float = 100.0
    _saved: dict[int, State] = field(default_factory=dict)
    _raised: int = 0  # the steps before the exception that was raised

    def record(self, **artifacts: Any) -> Record:
        self._noise = random.Random(self.noise)
        attempt, kills = 0, list(self.kills)
        self.emit(Kind.JOB_STARTED, {"submission": 0, "pid": 50})
        while not self._attempt(attempt, kills.pop(0) if kills else None):
            attempt += 1
            if self.resubmitted:
                self.emit(Kind.JOB_EXITED, {"submission": attempt - 1, "pid": 49 + attempt, "exit_code": 1}, after=0.3)
                self.emit(Kind.JOB_STARTED, {"submission": attempt, "pid": 50 + attempt}, after=0.5)
        last = attempt if self.resubmitted else 0
        self.emit(Kind.JOB_EXITED, {"submission": last, "pid": 50 + last, "exit_code": 0}, after=0.3)
        return Record(PLAN, tuple(self._events), artifacts)

    def emit(
        self, kind: Kind, data: Mapping[str, Any], rank: int | None = None, attempt: int | None = None,
        step: int | None = None, after: float = 0.01,
    ) -> None:  # fmt: skip
        assert FIELDS[kind] <= data.keys(), f"{kind.value} needs {sorted(FIELDS[kind] - data.keys())}"
        self._now += after
        source = "harness" if rank is None else f"rank{rank}-a{attempt}"
        number, self._numbers[source] = self._numbers[source], self._numbers[source] + 1
        self._events.append(Event(kind, source, number, 0.0, self._now, rank, attempt, step, data))

    def _attempt(self, attempt: int, kill: tuple[int, int] | None) -> bool:
        """True when the job came to its end."""
        world = self.worlds.get(attempt, self.world)
        for rank in range(world):
            data = {"pid": self._pid(attempt, rank), "start_ticks": attempt, "local_rank": rank, "world_size": world}
            self.emit(Kind.RANK_UP, {**data, "node": 0}, rank, attempt, after=0.2)
            if not self.log_only:
                self.emit(Kind.AGENT_STARTED, {**data, "python": "", "torch": "2.13.0", "hooks": []}, rank, attempt)
        for rank in range(0 if self.log_only else world):
            self.emit(Kind.GROUP_JOINED, {"blocked_s": 0.005}, rank, attempt)
        base, state = self._resume(attempt, world)
        step = base
        while (step := step + 1) <= (self.stops or self.steps):
            if self.raises and attempt == 0 and step == self.raises[0] and not self._raised:
                base, step, state = self._raise(world, step, step - base)
            if self.freeze and attempt == 0 and step == self.freeze[0]:
                hit = {"fault": "freeze", "phase": None, "global_step": step, "pid": self._pid(0, self.freeze[1])}
                self.emit(Kind.APPLYING, hit, self.freeze[1], 0, step - base)
                self._now += self.freeze[2]
            if kill and step == kill[0]:
                self._die(attempt, world, kill, step - base)
                return False
            self._step(attempt, world, state, step, step - base)
        for rank in range(world):
            if not self.log_only:
                self.emit(Kind.AGENT_ENDED, {"unseen": []}, rank, attempt)
            gone = {"pid": self._pid(attempt, rank), "start_ticks": attempt, "exit_code": 0}
            self.emit(Kind.RANK_EXITED, gone, rank, attempt)
        return True

    def _raise(self, world: int, step: int, local: int) -> tuple[int, int, State]:
        assert self.raises
        hit = {"fault": "raise", "phase": "forward", "global_step": step, "pid": self._pid(0, self.raises[1])}
        self.emit(Kind.APPLYING, hit, self.raises[1], 0, local - 1)
        self._raised, self._now = local - 1, self._now + self.raises[2]
        saved, state = self._resume(0, world)
        return saved + 1 - local, saved + 1, state

    def _resume(self, attempt: int, world: int) -> tuple[int, State]:
        state = State(1.0, [Stream(f"{self.seed}/{rank}") for rank in range(max(8, self.world))])
        base = 0 if attempt in self.rewinds else max(self._saved, default=0)
        if not base:
            return 0, state
        path = f"/job/checkpoints/step-{base}"
        for rank in range(world if self.loads_seen and not self.log_only else 0):
            self.emit(Kind.LOAD_BEGIN, {"path": path, "format": "dcp"}, rank, attempt, self._raised)
            data = {"path": path, "format": "dcp", "ok": True, "numbers": {"step": base}}
            self.emit(Kind.LOAD_END, data, rank, attempt, self._raised)
        kept = {
            "weights": ("weight",), "optimizer": ("momentum", "opt_step"), "momentum": ("momentum",),
            "sampler": ("position",), "schedule": ("sched_step",), "rng": ("rngs",),
        }  # fmt: skip
        restored = _copy(self._saved[base])
        restored.weight *= 1 + self.off
        broken = frozenset() if self.breaks and attempt not in self.breaks else self.broken
        for name in broken - {"rng1"}:
            for part in kept[name]:
                setattr(restored, part, getattr(state, part))
        if "rng1" in broken:
            restored.rngs[1] = state.rngs[1]
        return base, restored

    def _step(self, attempt: int, world: int, state: State, step: int, local: int) -> None:
        size = self.batch * self.world // world if self.global_batch else self.batch
        begins = local in {1, self._raised + 1}
        first = state.position % self.epoch * self.batch * self.world
        state.position += 1
        lr, counted = 0.1 * (1 - state.sched_step / (2 * self.steps)), state.sched_step
        parts = [list(range(first + rank * size, first + (rank + 1) * size)) for rank in range(world)]
        noise = [self._noise.random() * 1e-7 if self.noise else 0.0 for _rank in range(world)]
        drawn = [rng.digest() for rng in state.rngs[:world]]
        losses = [
            state.weight + 0.01 * state.rngs[rank].random() + 1e-4 * (sum(parts[rank]) % 97) + noise[rank]
            for rank in range(world)
        ]
        if self.named and (begins or (step - 1) % self.every == 0):
            self._tell_state(attempt, state, drawn, local - 1)
        begun, kept = state.weight, state.momentum
        state.opt_step, state.sched_step = state.opt_step + 1, state.sched_step + 1
        state.momentum = 0.9 * state.momentum + sum(losses) / world
        state.weight -= 0.01 * lr * state.momentum * (1 + 1 / state.opt_step)
        if self.rotates:
            turn = attempt % world
            parts, losses = parts[turn:] + parts[:turn], losses[turn:] + losses[:turn]
        for rank in range(world):
            own = f"+{rank}" if self.parts or (attempt and rank == self.apart) else ""
            data: dict[str, Any] = {
                "losses": [losses[rank]] if self.losses_seen else [],
                "samples": [f"d{index}" for index in parts[rank]] if self.samples_seen else [None] * size,
                "indices": parts[rank] if self.samples_seen else None, "lr": [lr],
                "opt_step": state.opt_step if self.counters_seen else None,
                "sched_step": counted if self.counters_seen else None, "phases": {}, "skipped": False,
            }  # fmt: skip
            if self.state_seen:
                own_sum = self._sum(state.weight, rank, world) if self.sharded else f"{state.weight!r}{own}"
                data |= {"norm": losses[rank], "parameters": own_sum, "moments": self._sum(state.momentum, rank, world)}
            if self.state_seen and begins:
                own_sum = self._sum(begun, rank, world) if self.sharded else f"{begun!r}{own}"
                data |= {"restored": own_sum, "restored_moments": self._sum(kept, rank, world)}
            if self.sketched:
                data |= {"sketch": _sketch(state.weight)}
                data |= {"restored_sketch": _sketch(begun)} if begins else {}
            unseen = self.blind and self._raised and self.raises and rank == self.raises[1]
            if not self.log_only and not unseen:
                self.emit(Kind.STEP, data, rank, attempt, local)
        if self.log_only and step % self.log_only == 0:
            self.emit(Kind.LOG_STEP, {"step": step, "adapter": "regex", "loss": losses[0], "lr": lr})
        if step % self.every == 0:
            self._save(attempt, world, state, step, local)

    def _tell_state(self, attempt: int, state: State, rngs: Sequence[str], local: int) -> None:
        for rank, rng in enumerate(rngs):
            entries = {name: ["float32 1", f"{int(value * 2**40) % MODULUS:016x}"]
                       for name, value in (("weight", state.weight), ("weight/momentum", state.momentum))}  # fmt: skip
            data = {
                "parameters": {"weight": entries["weight"]}, "frozen": {}, "buffers": {},
                "moments": {"weight/momentum": entries["weight/momentum"]} if state.momentum else {},
                "rng": {"torch": rng}, "at": "forward", "drawn": ["torch"], "inputs": {},
            }  # fmt: skip
            self.emit(Kind.BEGUN, data, rank, attempt, local)

    def _sum(self, value: float, rank: int, world: int) -> str:
        """A check sum of a number that this rank holds as a whole, or a part of."""
        whole = int(value * 2**40) % MODULUS
        if not self.sharded:
            return f"{whole:016x}{whole:016x}"
        unit = whole // sum(range(1, world + 1))  # no two ranks' parts are equal
        own = unit * (rank + 1) if rank else whole - unit * sum(range(2, world + 1))
        return f"{SHARD}{own:016x}{own:016x}"

    def _save(self, attempt: int, world: int, state: State, step: int, local: int) -> None:
        self._saved[step] = _copy(state)
        if self.log_only:
            return
        data = {"path": f"/job/checkpoints/step-{step}", "format": "dcp"}
        for kind, more in ((Kind.SAVE_BEGIN, {}), (Kind.SAVE_END, {"ok": True, "blocked_s": self.save_s})):
            for rank in range(world):
                self.emit(kind, {**data, **more}, rank, attempt, local)

    def _die(self, attempt: int, world: int, kill: tuple[int, int], local: int) -> None:
        step, victim = kill
        pid = self._pid(attempt, victim)
        self.emit(
            Kind.APPLYING,
            {"fault": "kill", "phase": "backward", "global_step": step, "pid": pid},
            victim,
            attempt,
            local,
        )
        gone = {"pid": pid, "start_ticks": attempt, "exit_code": -9}
        self.emit(Kind.RANK_EXITED, gone, victim, attempt, after=0.002)
        self.emit(Kind.ELASTIC_FAILURE, {"exit_code": -9, "local_rank": victim, "pid": pid}, victim, attempt, after=0.1)
        for rank in range(world):
            if rank != victim:
                gone = {"pid": self._pid(attempt, rank), "start_ticks": attempt, "exit_code": -15}
                self.emit(Kind.RANK_EXITED, gone, rank, attempt, after=0.05)
        if not self.resubmitted:
            self.emit(Kind.ELASTIC_RENDEZVOUS, {"done": True}, after=0.3)

    def _pid(self, attempt: int, rank: int) -> int:
        return 1000 + 10 * attempt + rank


def _copy(state: State) -> State:
    return replace(state, rngs=[replace(rng) for rng in state.rngs])


def _sketch(weight: float) -> list[float]:
    return [abs(weight), *(sign * weight for sign in (1, -1, 1, -1, 1, -1, 1, -1))]
