"""Simulated trainers of many kinds, and the journals of their runs, with the truth known: which step each rank really
made. A *world* says how a trainer names, saves, loads, warms up, logs, shards, counts and dies, and what is seen of it.

`DOMAINS` has the values of each property, the simplest first. A world is drawn from it, at random or by Hypothesis,
which then shrinks a failure towards the first values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from torchaos.harness.agent.check_sums import MODULUS
from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.record.history import History

DOMAINS: Mapping[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4),
    "ranks_later": (0, 0, 0, 1, 2, 3),  # of later attempts; 0: as many as before
    "steps": (14, 24, 33),
    "every": (4, 5, 3, 7, 1),  # steps between saves
    # The step that each attempt does not finish.
    "kills": ((9,), (1,), (3,), (12,), (9, 12), (6, 8), (12, 12), (5, 9, 13), (9, 9)),
    "names": ("step-{}", "last.pt", "ckpt_{}.pt", "checkpoint-{}", "iter_{}/model.pt", "save_{n}.pt", "epoch{n}.pt",
              "model_{n}/x.pt", "checkpoint-{n}"),  # {n}: the number of the save
    "from_zero": (False, False, False, True),  # the number in the name is one less
    "best": (False, False, True),  # the best model so far, in a file of its own that a resume reads too
    "best_last": (True, False),  # it is read after the checkpoint
    "older": (False, False, False, True),  # a resume looks into the checkpoint before, too
    "pretrained": ("", "", "", "/else/model.pt", "/else/step-5000.pt"),  # loaded at each start
    "writers": ("all", "first"),  # ranks that save
    "lag": (0, 0, 0, 1, 2, 3),  # steps by which a thread writes late; 0: no thread
    "contents": ("none", "step", "from_zero"),  # the number that the file holds
    "warm": (0, 0, 0, 2, 3),  # steps before each load
    "warm_data": ("same", "other"),  # the data of the warm-up: that of the first steps, or made-up
    "first_warm": (True, True, True, False),  # the first attempt warms up, too
    "log": (0, 1, 5),  # a line every so many steps
    "log_from": (0, -1),
    "log_anew": (False, False, False, True),  # the log counts from 1 in each attempt
    "counter": (True, True, True, False),  # the optimizer counts its steps
    "ahead": (0, 0, 0, 1),  # by how much its counter is ahead
    "schedule": ("constant", "linear", "counted"),
    "epoch": (1 << 20, 6, 11),  # steps in an epoch
    "shuffled": (True, False),  # each epoch has an order of its own
    "losses": (True, True, True, True, True, False),  # seen
    "samples": (True, True, True, False),
    "saves": (True, True, True, True, False),
    "loads": (True, True, True, True, False),
    # What is recorded of the state: sums by name at saves and resumes, or sums after each step.
    "state": ("named", "named", "named", "steps", "none"),
    "shards": (False, False, True),
    "rounding": (False, False, False, True),  # from the second step after a restart on, the sums differ by rounding
    "twin": (True, True, False),
    "role": (False, False, False, False, True),  # one more rank, which makes no steps, does the saving
    "seed": tuple(range(50)),
}  # fmt: skip
ROOT = "/job/ckpt"


@dataclass(frozen=True)
class World:
    ranks: int = 1
    ranks_later: int = 0
    steps: int = 14
    every: int = 4
    kills: tuple[int, ...] = (9,)
    names: str = "step-{}"
    from_zero: bool = False
    best: bool = False
    best_last: bool = True
    older: bool = False
    pretrained: str = ""
    writers: str = "all"
    lag: int = 0
    contents: str = "none"
    warm: int = 0
    warm_data: str = "same"
    first_warm: bool = True
    log: int = 0
    log_from: int = 0
    log_anew: bool = False
    counter: bool = True
    ahead: int = 0
    schedule: str = "constant"
    epoch: int = 1 << 20
    shuffled: bool = True
    losses: bool = True
    samples: bool = True
    saves: bool = True
    loads: bool = True
    state: str = "named"
    shards: bool = False
    rounding: bool = False
    twin: bool = True
    role: bool = False
    seed: int = 0
    defect: str = ""

    @property
    def straight(self) -> World:
        """The same trainer without a fault, and without a defect of its resume."""
        return World(**{**self.__dict__, "kills": (), "defect": ""})


def drawn(by: random.Random) -> World:
    return World(**{name: by.choice(values) for name, values in DOMAINS.items()})


@dataclass
class _State:
    weights: list[float]
    draws: list[int]  # of each rank's random numbers
    moments: list[float] = field(default_factory=lambda: [0.0, 0.0])
    opt_step: int = 0
    sched_step: int = 0
    position: int = 0  # batches drawn
    step: int = 0  # of the trainer's loop


@dataclass
class _Saved:
    """A checkpoint: the state after a step, and the files of it."""

    state: _State
    step: int
    files: list[tuple[str, float | None]]  # path, and the number in its contents
    ended_s: float = float("inf")


class Trainer:
    """Runs a world. `events`: its journal; `truth`: by (attempt, rank, local step): the trainer's step, or 0 for a step
    that only warms up."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: list[Event] = []
        self.truth: dict[tuple[int, int, int], int] = {}
        self._now, self._numbers = 100.0, 0
        self._saved: list[_Saved] = []
        self._late: list[tuple[int, _Saved]] = []  # the local step at which a thread writes it
        self._best = float("inf")
        self._best_file: tuple[str, float | None] | None = None
        self._local: dict[int, int] = {}
        self._begins = False

    def run(self) -> Trainer:
        kills = [*self.world.kills, 0]
        self._emit(Kind.JOB_STARTED, {"submission": 0, "pid": 50})
        for attempt, kill in enumerate(kills):
            if self._attempt(attempt, kill):
                break
        self._emit(Kind.JOB_EXITED, {"submission": 0, "pid": 50, "exit_code": 0})
        return self

    # -- an attempt ----------------------------------------------------------------------------------------------

    def _attempt(self, attempt: int, kill: int) -> bool:
        world = self.world
        ranks = range(world.ranks_later if attempt and world.ranks_later else world.ranks)
        everyone = range(len(ranks) + world.role)
        for rank in everyone:
            data = {
                "pid": 1000 + 10 * attempt + rank,
                "start_ticks": attempt,
                "local_rank": rank,
                "world_size": len(everyone),
            }
            self._emit(Kind.RANK_UP, {**data, "node": 0}, attempt, rank, after=0.2)
            self._emit(Kind.AGENT_STARTED, {**data, "python": "", "torch": "2.13.0", "hooks": []}, attempt, rank)
        self._local, self._late = dict.fromkeys(everyone, 0), []
        self._begins = self._was_handled = True
        state = self._fresh()
        warm = world.warm if attempt or world.first_warm else 0
        for number in range(1, warm + 1):
            self._step(attempt, ranks, state, 0, number)
        self._begins = self._was_handled = True  # the state of before the warm-up is put back
        state = self._resume(attempt, everyone, self._fresh())
        if world.ahead and world.counter and state.opt_step == 0:
            for rank in ranks:
                self._emit(Kind.AHEAD, {"steps": world.ahead}, attempt, rank, self._local[rank], 0.0)
        while state.step < world.steps:
            if state.step + 1 == kill:
                self._die(attempt, everyone)
                return False
            self._step(attempt, ranks, state, state.step + 1, 0)
            self._write_late(attempt, ranks)
            if state.step % world.every == 0:
                self._save(attempt, ranks, state)
        for rank in everyone:
            self._emit(Kind.AGENT_ENDED, {"unseen": []}, attempt, rank)
            self._exited(attempt, rank, 0)
        return True

    def _fresh(self) -> _State:
        return _State([1.0 + self.world.seed / 7, 0.5], [0] * 8)

    def _die(self, attempt: int, everyone: range) -> None:
        for rank in everyone:
            self._exited(attempt, rank, -9 if rank == 0 else -15)
        self._emit(Kind.ELASTIC_RENDEZVOUS, {"done": True}, after=0.3)

    def _exited(self, attempt: int, rank: int, code: int) -> None:
        gone = {"pid": 1000 + 10 * attempt + rank, "start_ticks": attempt, "exit_code": code}
        self._emit(Kind.RANK_EXITED, gone, attempt, rank, after=0.005)

    # -- a step --------------------------------------------------------------------------------------------------

    def _step(self, attempt: int, ranks: range, state: _State, step: int, warm: int) -> None:
        """Makes the trainer's step `step`, or step `warm` of a warm-up."""
        world = self.world
        lr = 0.1 if world.schedule == "constant" else 0.1 / (1 + state.sched_step)
        samples = [self._samples(state.position, rank, len(ranks), bool(warm)) for rank in ranks]
        state.position += 1
        for rank in ranks:
            state.draws[rank] += 1
        losses = [
            state.weights[0] + 0.3 * state.weights[1] + 1e-3 * (sum(map(hash_, own)) % 89)
            + 1e-4 * (hash_(f"{world.seed}/{rank}/{state.draws[rank]}") % 97)
            for rank, own in zip(ranks, samples, strict=True)
        ]  # fmt: skip
        if self._begins:
            self._begins = False
            self._begun(attempt, ranks, state)
        restored = self._sums(state, ranks) if world.state == "steps" else []
        mean = sum(losses) / len(losses)
        state.moments = [0.9 * moment + mean * scale for moment, scale in zip(state.moments, (1.0, 0.5), strict=True)]
        state.weights = [w - lr * 0.05 * m for w, m in zip(state.weights, state.moments, strict=True)]
        if world.rounding and attempt and self._local[ranks[0]]:
            state.weights = [w * (1 + 1e-15 * (attempt + 1)) for w in state.weights]
        state.opt_step += 1
        counted = state.sched_step
        state.sched_step += 1
        if step:
            state.step = step
        for rank in ranks:
            self._local[rank] += 1
            self.truth[attempt, rank, self._local[rank]] = step
            own = samples[rank]
            data: dict[str, Any] = {
                "losses": [losses[rank]] if world.losses else [],
                "samples": own if world.samples else [None] * len(own), "indices": None, "lr": [lr],
                "opt_step": state.opt_step + world.ahead if world.counter else None,
                "sched_step": counted if world.schedule == "counted" else None, "phases": {}, "skipped": False,
            }  # fmt: skip
            if world.state == "steps":
                data |= {"norm": 1.0, "parameters": self._sums(state, ranks)[rank], "moments": "0" * 32}
                if self._was_handled:
                    data |= {"restored": restored[rank], "restored_moments": "0" * 32}
            self._emit(Kind.STEP, data, attempt, rank, self._local[rank])
        self._was_handled = False
        printed = step + world.log_from - (self._base if world.log_anew else 0)
        if step and world.log and step % world.log == 0:
            self._emit(Kind.LOG_STEP, {"step": printed, "adapter": "regex", "loss": losses[0]})

    _was_handled = False
    _base = 0

    def _samples(self, position: int, rank: int, world: int, warm: bool) -> list[str]:
        if warm and self.world.warm_data == "other":
            return [f"dummy{position}"]
        epoch, at = divmod(position, self.world.epoch)
        turn = f"e{epoch}-" if self.world.shuffled else ""
        return [f"{turn}{at * world + rank}.{number}" for number in range(2)]

    def _sums(self, state: _State, ranks: range) -> list[str]:
        texts = []
        for rank in ranks:
            value = sum(hash_(repr(weight)) for weight in state.weights) % MODULUS
            if self.world.shards:
                share = value // len(ranks)
                own = share if rank else value - share * (len(ranks) - 1)
                texts.append(f"shard-{own:016x}{own:016x}")
            else:
                texts.append(f"{value:016x}{value:016x}")
        return texts

    def _named(self, state: _State, rank: int, ranks: range) -> dict[str, list[str]]:
        found = {}
        for number, weight in enumerate(state.weights):
            value = hash_(repr(weight))
            if self.world.shards:
                share = value // len(ranks)
                own = share if rank else value - share * (len(ranks) - 1)
                found[f"layer{number}.weight"] = ["float32 4x4", f"part{rank}-{own:016x}"]
            else:
                found[f"layer{number}.weight"] = ["float32 4x4", f"{value:016x}"]
        return found

    def _begun(self, attempt: int, ranks: range, state: _State) -> None:
        if self.world.state == "named":
            for rank in ranks:
                data = {"parameters": self._named(state, rank, ranks), "at": "forward"}
                self._emit(Kind.BEGUN, data, attempt, rank, self._local[rank], 0.001)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, attempt: int, ranks: range, state: _State) -> None:
        world = self.world
        self._numbers += 1
        number = state.step - world.from_zero
        told = {"none": None, "step": state.step, "from_zero": state.step - 1}[world.contents]
        path = f"{ROOT}/{world.names.format(number, n=self._numbers)}"
        saved = _Saved(_copy(state), state.step, [(path, told)])
        better = hash_(f"{world.seed}{state.step}") % 3 == 0
        if world.best and better:
            self._best_file = (f"{ROOT}/best-step-{state.step}.pt", state.step if world.contents != "none" else None)
            self._write(attempt, ranks, [self._best_file], 0.05, ranks[0] + self._local[ranks[0]] * 0)
        if world.lag:
            self._late.append((self._local[ranks[0]] + world.lag, saved))
        else:
            if world.state == "named":
                for rank in self._writers(ranks):
                    if rank in ranks:
                        data = {"parameters": self._named(state, rank, ranks)}
                        self._emit(Kind.KEPT, data, attempt, rank, self._local[rank], 0.001)
            self._write(attempt, ranks, saved.files, 0.05, 0)
            saved.ended_s = self._now
            self._saved.append(saved)
        self._begins = self._was_handled = True

    def _write_late(self, attempt: int, ranks: range) -> None:
        due = [saved for at, saved in self._late if at <= self._local[ranks[0]]]
        self._late = [(at, saved) for at, saved in self._late if at > self._local[ranks[0]]]
        for saved in due:
            self._write(attempt, ranks, saved.files, 0.0, 0)
            self._saved.append(saved)
            self._begins = self._was_handled = True

    def _writers(self, ranks: range) -> list[int]:
        if self.world.role:
            return [len(ranks)]
        return list(ranks) if self.world.writers == "all" else [0]

    def _write(
        self, attempt: int, ranks: range, files: list[tuple[str, float | None]], blocked_s: float, _: int
    ) -> None:
        if not self.world.saves:
            return
        for path, _told in files:
            for kind, more in ((Kind.SAVE_BEGIN, {}), (Kind.SAVE_END, {"ok": True, "blocked_s": blocked_s})):
                for rank in self._writers(ranks):
                    data = {"path": path, "format": "torch", **more}
                    self._emit(kind, data, attempt, rank, self._local[rank], 0.002)

    def _resume(self, attempt: int, everyone: range, fresh: _State) -> _State:
        world = self.world
        chosen = self._saved[-1] if self._saved else None
        files: list[tuple[str, float | None]] = []
        if world.pretrained:
            files.append((world.pretrained, 5000 if "5000" in world.pretrained else None))
        if chosen:
            own = list(chosen.files)
            looked = [self._best_file] if world.best and self._best_file else []
            if world.older and len(self._saved) > 1 and self._saved[-2].files != chosen.files:
                files += self._saved[-2].files
            files += [*own, *looked] if world.best_last else [*looked, *own]
        if world.loads and files:
            for path, told in files:
                for rank in everyone:
                    data = {"path": path, "format": "torch"}
                    self._emit(Kind.LOAD_BEGIN, data, attempt, rank, self._local[rank], 0.001)
                    ended = {**data, "ok": True, "numbers": {} if told is None else {"step": told}}
                    self._emit(Kind.LOAD_END, ended, attempt, rank, self._local[rank], 0.001)
            self._begins = self._was_handled = True
        self._base = chosen.step if chosen else 0
        return _copy(chosen.state) if chosen else fresh

    # -- the journal ---------------------------------------------------------------------------------------------

    def _emit(
        self, kind: Kind, data: Mapping[str, Any], attempt: int | None = None, rank: int | None = None,
        step: int | None = None, after: float = 0.01,
    ) -> None:  # fmt: skip
        self._now += after
        source = "harness" if rank is None else f"rank{rank}-a{attempt}"
        self.events.append(Event(kind, source, len(self.events), 0.0, self._now, rank, attempt, step, data))


def hash_(text: str) -> int:
    """A number that depends on the text alone, in each process."""
    return crc32(text.encode()) * 0x9E3779B97F4A7C15 >> 1 & (1 << 63) - 1


def _copy(state: _State) -> _State:
    return replace(state, weights=[*state.weights], draws=[*state.draws], moments=[*state.moments])


def outcome(world: World) -> str:
    """How the history places the steps of this world: "right", "unknown" (some are not placed) or "wrong". They are
    right if all are ahead of the trainer's own count by the same number."""
    run = Trainer(world).run()
    twin = History.of(Trainer(world.straight).run().events) if world.twin else None
    ahead = set[int | None]()
    for execution in History.of(run.events, twin).executions:
        if step := run.truth[execution.attempt, execution.rank, execution.local_step]:
            ahead.add(None if execution.global_step is None else execution.global_step - step)
    if len(ahead - {None}) > 1:
        return "wrong"
    return "unknown" if None in ahead else "right"
