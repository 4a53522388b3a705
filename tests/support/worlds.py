"""Simulated trainers of many kinds, and the journals of their runs, with the truth known: which step each rank really
made. A *world* says how a trainer names, saves, loads, warms up, logs, shards, counts and dies, and what is seen of it.

`DOMAINS` has the values of each property, the simplest first. A world is drawn from it, at random or by Hypothesis,
which then shrinks a failure towards the first values."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from zlib import crc32

from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.lr_continuity import LrContinuity
from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.assertions.state_restored import StateRestored
from torchaos.harness.analysis.replica_verdict import judged as of_assertion
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.check_sums import MODULUS
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.history import History
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps.executions import UNPLACED

DOMAINS: Mapping[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4),
    "ranks_later": (0, 0, 0, 1, 2, 3),  # of later attempts; 0: as many as before
    "steps": (14, 24, 33),
    "every": (4, 5, 3, 7, 1),  # steps between saves
    # The step that each attempt does not finish.
    "kills": ((9,), (1,), (3,), (12,), (9, 12), (6, 8), (12, 12), (5, 9, 13), (9, 9), (3, 3), (2, 3, 2)),
    "names": ("step-{}", "last.pt", "ckpt_{}.pt", "checkpoint-{}", "iter_{}/model.pt", "save_{n}.pt", "epoch{n}.pt",
              "model_{n}/x.pt", "checkpoint-{n}", "current/model.pt"),  # {n}: the number of the save
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
    # What is recorded of the state: sums by name at saves and resumes, sums after each step, or both.
    "state": ("named", "named", "all", "steps", "none"),
    "shards": (False, False, True, "pairs"),  # each rank holds a part; or each pair of ranks has two parts
    "rounding": (False, False, False, True),  # from the second step after a restart on, the sums differ by rounding
    "twin": (True, True, False),
    "role": (False, False, False, False, True),  # one more rank, which makes no steps, does the saving
    "memory": (False, False, False, True),  # each save is in memory, and each second one also on the disk
    # How the file that is loaded gets its name: it is saved so; or renamed after the save; or a link or a copy, which
    # is not seen.
    "named_by": ("save", "save", "rename", "copy"),
    "last": (False, False, True),  # the newest checkpoint is saved as last.pt too, and loaded
    "outlives": (False, True),  # a writer that is late ends after the death of its job
    "swapped": (False, False, True),  # an average of the weights takes their place while the job saves
    "plain": (False, True),  # an optimizer that does not count is no class of torch
    # Ranks whose steps differ: one dies up to three steps before the others; one has no data for the last steps, or for
    # the last step of each epoch; one acts, twice for each step of the others.
    "uneven": ("", "", "", "", "", "", "", "dies", "joins", "epochs", "acts"),
    "seed": tuple(range(50)),
    # The job changes its weights after the optimizer's step: clips them, or takes averages of several ranks or steps.
    "changed": (False, False, False, True),
    # At step 6 the job puts older weights back, while all else goes on, and a counter or the log shows it.
    "reloads": (False, False, False, True),
}  # fmt: skip
ROOT = "/job/ckpt"
_JOB = PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0, ROOT)
PLAN = Plan("made-up", "", 7, _JOB, (), ())
ASSERTIONS = (StateRestored(), LossContinuity(), SampleAccounting(), LrContinuity(), NoLostWork())


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
    shards: bool | str = False
    rounding: bool = False
    twin: bool = True
    role: bool = False
    memory: bool = False
    named_by: str = "save"
    last: bool = False
    outlives: bool = False
    swapped: bool = False
    plain: bool = False
    uneven: str = ""
    seed: int = 0
    changed: bool = False
    reloads: bool = False
    defect: str = ""
    # Only of worlds that are judged:
    second: str = ""  # one more defect of the resume
    data: str = "loader"  # or "drawn" with the ranks' random numbers, or "made" from the weights
    skipping: str = ""  # iterations without an update: by a loss scaler of torch ("scaler"), or of the job ("own")
    hidden: str = ""  # where a number that is not recorded acts: "loss", "gradients", "update" or "data"
    backwards: int = 1  # in each step
    noise: bool = False  # nothing seeds a small part of the loss
    run: int = 0  # the run's number, for the noise

    def ranks_of(self, attempt: int) -> int:
        return self.ranks_later if attempt and self.ranks_later else self.ranks

    @property
    def has_no_common_step(self) -> bool:
        """Whether ranks count steps of their own, so that after a restart it is right that none is known."""
        return self.uneven in ("epochs", "acts") and max(self.ranks, self.ranks_later) > 1

    @property
    def straight(self) -> World:
        """The same trainer without a fault, and without a defect of its resume."""
        return replace(self, kills=(), defect="", second="", run=self.run + 1)


def drawn(by: random.Random) -> World:
    return World(**{name: by.choice(values) for name, values in DOMAINS.items()})


@dataclass
class _State:
    weights: list[float]
    draws: list[int]  # of each rank's random numbers
    moments: list[float] = field(default_factory=lambda: [0.0, 0.0])
    frozen: float = 0.7
    buffer: float = 1.0  # such as a running mean; it acts on the loss
    opt_step: int = 0
    sched_step: int = 0
    rate: float = 0.1
    scale: float = 1.0  # of the loss
    position: int = 0  # batches drawn
    turn: int = 0  # by which the ranks' parts of a batch are exchanged
    good: int = 0  # iterations since the last that made no update
    hidden: float = 0.3
    step: int = 0  # of the trainer's loop


@dataclass
class _Saved:
    """A checkpoint: the state after a step, and the files of it."""

    state: _State
    step: int
    files: list[tuple[str, float | None]]  # path, and the number in its contents


class Defect(NamedTuple):
    """A defect of the resume. `plant`: changes the restored state; it also gets a fresh one, and an older one."""

    says: str  # a regular expression: what a right cause says
    plant: Callable[[_State, _State, _State], None] = lambda restored, fresh, older: None


def _take(*names: str, of: str = "fresh") -> Callable[[_State, _State, _State], None]:
    def plant(restored: _State, fresh: _State, older: _State) -> None:
        for name in names:
            setattr(restored, name, getattr(_copy(fresh if of == "fresh" else older), name))

    return plant


def _add(name: str, by: float) -> Callable[[_State, _State, _State], None]:
    return lambda restored, fresh, older: setattr(restored, name, getattr(restored, name) + by)


def _put(name: str, value: Callable[[_State, _State], Any]) -> Callable[[_State, _State, _State], None]:
    return lambda restored, fresh, older: setattr(restored, name, value(restored, fresh))


_WEIGHTS, _MOMENTS, _DATA, _SCHEDULE = "weight|parameter", "moment", "data|sample", "schedul|rate"
DEFECTS: Mapping[str, Defect] = {
    "weights of a fresh start": Defect(_WEIGHTS, _take("weights")),
    "one weight of a fresh start": Defect(_WEIGHTS, _put("weights", lambda s, fresh: [s.weights[0], fresh.weights[1]])),
    "older weights": Defect(_WEIGHTS, _take("weights", of="older")),
    "a bit of a weight": Defect(_WEIGHTS, _put("weights", lambda s, _: [s.weights[0] * (1 + 2**-30), s.weights[1]])),
    "weights exchanged": Defect(_WEIGHTS, _put("weights", lambda s, _: s.weights[::-1])),
    "weights of low precision": Defect(_WEIGHTS, _put("weights", lambda s, _: [round(w, 3) for w in s.weights])),
    "frozen weights changed": Defect("frozen", _add("frozen", 0.05)),
    "buffer of a fresh start": Defect("buffer", _take("buffer")),
    "older buffer": Defect("buffer", _take("buffer", of="older")),
    "moments of a fresh start": Defect(_MOMENTS, _put("moments", lambda s, _: [0.0, 0.0])),
    "one moment lost": Defect(_MOMENTS, _put("moments", lambda s, _: [s.moments[0], 0.0])),
    "moments exchanged": Defect(_MOMENTS, _put("moments", lambda s, _: s.moments[::-1])),
    "older moments": Defect(_MOMENTS, _take("moments", of="older")),
    "counter of a fresh start": Defect("counter", _take("opt_step")),
    "counter ahead": Defect("counter", _add("opt_step", 1)),
    "counter behind": Defect("counter", _add("opt_step", -1)),
    "optimizer of a fresh start": Defect("counter|moment", _take("opt_step", "moments")),
    "schedule of a fresh start": Defect(_SCHEDULE, _take("sched_step")),
    "schedule ahead": Defect(_SCHEDULE, _add("sched_step", 1)),
    "schedule behind": Defect(_SCHEDULE, _add("sched_step", -1)),
    "other rate": Defect(_SCHEDULE, _add("rate", 0.05)),
    "RNG of a fresh start": Defect("RNG", _take("draws")),
    "RNG ahead": Defect("RNG", _put("draws", lambda s, _: [drawn + 1 for drawn in s.draws])),
    "RNG of rank 1": Defect("RNG", _put("draws", lambda s, _: [s.draws[0], 0, *s.draws[2:]])),
    "data from the start": Defect(_DATA, _take("position")),
    "data of an older step": Defect(_DATA, _take("position", of="older")),
    "data skipped": Defect(_DATA, _add("position", 2)),
    "data repeated": Defect(_DATA, _add("position", -1)),
    "data of other ranks": Defect(_DATA, _add("turn", 1)),
    "loss scale": Defect("loss scale", _add("scale", 1.0)),
    "only the weights": Defect(".", _take("moments", "opt_step", "sched_step", "position", "draws", "buffer")),
    "takes an older checkpoint": Defect("older|newer|went on from step"),
}  # fmt: skip
# Defects of what no record shows. The second is that of a loss scaler: it skips other updates.
UNSEEN_DEFECTS: Mapping[str, Defect] = {
    "hidden of a fresh start": Defect("not recorded", _take("hidden")),
    "good of a fresh start": Defect("skip", _take("good")),
}


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
        self.resumed: _Saved | None = None  # the checkpoint of the last resume

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
        ranks = range(world.ranks_of(attempt))
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
        self._local, self._late, self._dropped = dict.fromkeys(everyone, 0), [], 0
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
                if world.uneven == "dies" and len(ranks) > 1:  # the others go on until they have to wait
                    for ahead in range(1 + world.seed % 3):
                        self._step(attempt, ranks, state, kill + ahead, 0, without=ranks[-1])
                self._die(attempt, everyone, kill)
                return False
            self._step(attempt, ranks, state, state.step + 1, 0)
            if self._dropped:
                continue
            self._write_late(attempt, ranks)
            if world.reloads and state.step == 6 and (world.counter or (world.log == 1 and not world.log_anew)):
                self._reload(attempt, ranks, state)
            if state.step % world.every == 0:
                self._save(attempt, ranks, state)
        for rank in everyone:
            self._emit(Kind.AGENT_ENDED, {"unseen": []}, attempt, rank)
            self._exited(attempt, rank, 0)
        return True

    def _fresh(self) -> _State:
        return _State([1.0 + self.world.seed / 7, 0.5], [0] * 8)

    def _die(self, attempt: int, everyone: range, step: int) -> None:
        hit = {"fault": "kill", "phase": "backward", "global_step": step, "pid": 1000 + 10 * attempt}
        self._emit(Kind.APPLYING, hit, attempt, 0, self._local[0])
        for rank in everyone:
            self._exited(attempt, rank, -9 if rank == 0 else -15)
        if self.world.outlives:
            ranks = range(len(everyone) - self.world.role)
            for number, (_at, saved) in enumerate(self._late):
                self._write(attempt, ranks, saved.files, 0.0, 5000 + number)
                for rank in self._writers(ranks):
                    gone = {"child": 5000 + number}
                    self._emit(Kind.WRITER_ENDED, gone, attempt, rank)
                self._saved.append(saved)
        self._emit(Kind.ELASTIC_RENDEZVOUS, {"done": True}, after=0.3)

    def _exited(self, attempt: int, rank: int, code: int) -> None:
        gone = {"pid": 1000 + 10 * attempt + rank, "start_ticks": attempt, "exit_code": code}
        self._emit(Kind.RANK_EXITED, gone, attempt, rank, after=0.005)

    # -- a step --------------------------------------------------------------------------------------------------

    def _step(
        self, attempt: int, ranks: range, state: _State, step: int, warm: int, without: int | None = None
    ) -> None:  # fmt: skip
        """Makes the trainer's step `step`, or step `warm` of a warm-up; the rank `without` does not complete it."""
        world = self.world
        lr = state.rate if world.schedule == "constant" else state.rate / (1 + max(state.sched_step, 0))
        turns = [(rank + state.turn) % len(ranks) for rank in ranks]
        samples: list[list[str]] = [[] for _ in ranks]
        losses: list[list[float]] = [[] for _ in ranks]
        began = _copy(state)
        for _ in range(world.backwards):
            for place, rank in enumerate(ranks):
                state.draws[rank] += 1
                own = self._samples(state.position, turns[place], len(ranks), bool(warm))
                own = [self._named_by_data(sample, state, rank) for sample in own]
                samples[place] += own
                losses[place].append(state.scale * self._loss(state, rank, own))
            state.position += 1
        if self._begins:
            self._begins = False
            self._begun(attempt, [rank for rank in ranks if not self._has_no_data(rank, ranks, step)], ranks, began)
        state.buffer = 0.9 * state.buffer + 0.1 * losses[0][0] / state.scale
        begun = _copy(state)
        mean = sum(map(sum, losses)) / len(ranks) / world.backwards / state.scale
        mean += 0.1 * state.hidden if world.hidden == "gradients" else 0.0
        state.hidden = 0.9 * state.hidden + 0.1 * mean
        skips = bool(world.skipping) and state.good == 4
        state.good = 0 if skips else state.good + 1
        if skips and world.skipping == "own":
            self._dropped += 1
            return
        state.moments = [0.9 * moment + mean * scale for moment, scale in zip(state.moments, (1.0, 0.5), strict=True)]
        by = lr * 0.05 * (1 + 1 / (1 + max(state.opt_step, 0))) + (
            1e-4 * state.hidden if world.hidden == "update" else 0.0
        )
        state.weights = [w - by * m for w, m in zip(state.weights, state.moments, strict=True)]
        if skips:
            state.weights, state.moments = [*began.weights], [*began.moments]
        if world.rounding and attempt and self._local[ranks[0]]:
            state.weights = [w * (1 + 1e-15 * (attempt + 1)) for w in state.weights]
        made = _copy(state)
        if world.changed:
            state.weights = [max(weight * 0.999, -1.0) for weight in state.weights]
        state.opt_step += not skips
        counted = state.sched_step
        state.sched_step += not skips
        if step:
            state.step = step
        for rank in ranks:
            if rank == without or (step and self._has_no_data(rank, ranks, step)):
                continue
            self._local[rank] += 1
            self.truth[attempt, rank, self._local[rank]] = self._own_step(rank, ranks, step)
            own = samples[rank]
            data: dict[str, Any] = {
                "losses": losses[rank] if world.losses else [],
                "samples": own if world.samples else [None] * len(own), "indices": None, "lr": [lr],
                "opt_step": state.opt_step + world.ahead if world.counter else None,
                "sched_step": counted if world.schedule == "counted" else None, "phases": {}, "skipped": skips,
                "dropped": self._dropped,
            }  # fmt: skip
            if world.state in ("steps", "all"):
                data |= {"norm": mean, **self._sums(made, rank, ranks)}
                if self._was_handled:
                    before = self._sums(begun, rank, ranks)
                    data |= {"restored": before["parameters"], "restored_moments": before["moments"]}
            acts = world.uneven == "acts" and len(ranks) > 1 and rank == ranks[-1]
            if acts and data["opt_step"]:
                data["opt_step"] = data["opt_step"] * 2 - 1
            self._emit(Kind.STEP, data, attempt, rank, self._local[rank])
            if acts:
                self._local[rank] += 1
                self.truth[attempt, rank, self._local[rank]] = 2 * step if len(ranks) == world.ranks else 0
                more = {name: value for name, value in data.items() if "restored" not in name}
                more["opt_step"] = more["opt_step"] and more["opt_step"] + 1
                more["samples"] = [f"act{sample}" for sample in own] if world.samples else more["samples"]
                self._emit(Kind.STEP, more, attempt, rank, self._local[rank])
        self._was_handled, self._dropped = False, 0
        printed = step + world.log_from - (self._base if world.log_anew else 0)
        if step and world.log and step % world.log == 0:
            self._emit(Kind.LOG_STEP, {"step": printed, "adapter": "regex", "loss": losses[0][0]})

    def _loss(self, state: _State, rank: int, samples: Sequence[str]) -> float:
        drawn, world = hash_(f"{self.world.seed}/{rank}/{state.draws[rank]}") % 97, self.world
        noise = hash_(f"{world.run}/{rank}/{state.position}/{state.step}") % 89 if world.noise else 0
        return (
            state.weights[0] + 0.3 * state.weights[1] + 0.2 * state.frozen + 0.1 * state.buffer
            + 1e-3 * (sum(map(hash_, samples)) % 89) + 1e-4 * drawn + 1e-9 * noise
            + (0.1 * state.hidden if world.hidden == "loss" else 0.0)
        )  # fmt: skip

    def _named_by_data(self, sample: str, state: _State, rank: int) -> str:
        if self.world.hidden == "data":
            return f"{sample}:{state.hidden!r}"
        if self.world.data == "drawn":
            return f"{sample}:{state.draws[rank]}"
        return f"{sample}:{state.weights[0]!r}" if self.world.data == "made" else sample

    def _has_no_data(self, rank: int, ranks: range, step: int) -> bool:
        if len(ranks) < 2 or rank != ranks[-1]:
            return False
        return {"joins": step > self.world.steps - 3, "epochs": not step % 4}.get(self.world.uneven, False)

    def _own_step(self, rank: int, ranks: range, step: int) -> int:
        """The trainer's step as this rank counts it."""
        is_last = len(ranks) > 1 and rank == ranks[-1] and step > 0
        if is_last and self.world.has_no_common_step and len(ranks) != self.world.ranks:
            return 0  # it was another rank before
        if is_last and self.world.uneven == "epochs":
            return step - step // 4 + self._base // 4
        return 2 * step - 1 if step and is_last and self.world.uneven == "acts" else step

    _was_handled = False
    _dropped = 0
    _base = 0

    def _samples(self, position: int, rank: int, world: int, warm: bool) -> list[str]:
        if warm and self.world.warm_data == "other":
            return [f"dummy{position}"]
        epoch, at = divmod(position, self.world.epoch)
        turn = f"e{epoch}-" if self.world.shuffled else ""
        return [f"{turn}{at * world + rank}.{number}" for number in range(2)]

    def _sums(self, state: _State, rank: int, ranks: range) -> dict[str, str]:
        """The check sums of a rank after a step (see agent/state/state_check_sums.py)."""
        found = {}
        for name, values in (("parameters", state.weights), ("moments", state.moments)):
            factored = sum((3 + place) * hash_(repr(value)) for place, value in enumerate(values))
            found[name] = self._shared(factored, rank, ranks, "shard-") + self._shared(
                sum(hash_(repr(value)) for value in values), rank, ranks, ""
            )
        return found

    def _shared(self, value: int, rank: int, ranks: range, prefix: str) -> str:
        """The sum of this rank's part of a value, or of the whole value."""
        if not self.world.shards:
            return f"{value % MODULUS:016x}"
        parts = 2 if self.world.shards == "pairs" and prefix.startswith("part") and not len(ranks) % 2 else len(ranks)
        share = value % MODULUS // parts
        return f"{prefix}{share if rank % parts else value % MODULUS - share * (parts - 1):016x}"

    def _named(self, state: _State, rank: int, ranks: range) -> dict[str, Any]:
        """The state of a rank, as the agent records it (see wire.py: KEPT, BEGUN)."""
        found = {}
        for number, weight in enumerate(state.weights):
            pairs = self.world.shards == "pairs" and not len(ranks) % 2
            own = self._shared(hash_(repr(weight)), rank, ranks, f"part{rank % 2 if pairs else rank}-")
            found[f"layer{number}.weight"] = ["float32 4x4", own]
        moments = {f"layer{number}.weight/exp_avg": _sum_of(moment) for number, moment in enumerate(state.moments)}
        frozen = {"base.weight": _sum_of(state.frozen)}
        if self.world.plain and not self.world.counter:
            found, frozen = {}, {**frozen, **found}
        return {
            "parameters": found, "frozen": frozen,
            "buffers": {"norm.mean": _sum_of(state.buffer)}, "moments": moments if state.opt_step else {},
            "rng": {"torch": f"{hash_(f'{rank}/{state.draws[rank]}'):016x}", "python": "0" * 16},
        }  # fmt: skip

    def _begun(self, attempt: int, beginning: Sequence[int], ranks: range, state: _State) -> None:
        if self.world.state in ("named", "all"):
            for rank in beginning:
                data = {**self._named(state, rank, ranks), "at": "forward", "drawn": ["torch"]}
                self._emit(Kind.BEGUN, data, attempt, rank, self._local[rank], 0.001)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, attempt: int, ranks: range, state: _State) -> None:
        world = self.world
        self._numbers += 1
        number = state.step - world.from_zero
        told = {"none": None, "step": state.step, "from_zero": state.step - 1}[world.contents]
        root = f"/memory{ROOT}" if world.memory and self._numbers % 2 else ROOT
        path = f"{root}/{world.names.format(number, n=self._numbers)}"
        saved = _Saved(_copy(state), state.step, [(path, told)])
        if world.last:
            saved.files.append((f"{root}/last.pt", told))
        better = hash_(f"{world.seed}{state.step}") % 3 == 0
        if world.best and better:
            self._best_file = (f"{ROOT}/best-step-{state.step}.pt", state.step if world.contents != "none" else None)
            self._write(attempt, ranks, [self._best_file], 0.05)
        if world.lag:
            self._late.append((self._local[ranks[0]] + world.lag, saved))
        else:
            if world.state in ("named", "all") and world.saves:
                shown = replace(state, weights=[0.5 * w for w in state.weights]) if world.swapped else state
                for rank in self._writers(ranks):
                    if rank in ranks:
                        data = self._named(shown, rank, ranks)
                        self._emit(Kind.KEPT, data, attempt, rank, self._local[rank], 0.001)
            self._write(attempt, ranks, saved.files, 0.05)
            self._saved.append(saved)

    def _write_late(self, attempt: int, ranks: range) -> None:
        due = [saved for at, saved in self._late if at <= self._local[ranks[0]]]
        self._late = [(at, saved) for at, saved in self._late if at > self._local[ranks[0]]]
        for saved in due:
            self._write(attempt, ranks, saved.files, 0.0)
            self._saved.append(saved)

    def _writers(self, ranks: range) -> list[int]:
        if self.world.role:
            return [len(ranks)]
        return list(ranks) if self.world.writers == "all" else [0]

    def _write(
        self, attempt: int, ranks: range, files: list[tuple[str, float | None]], blocked_s: float, child: int = 0
    ) -> None:  # fmt: skip
        """Writes the files. `child`: the pid of a forked process that does it, and that ends after its job."""
        if not self.world.saves:
            return
        self._begins = self._was_handled = True
        for path, _told in files:
            renamed = self.world.named_by == "rename"
            for kind, more in ((Kind.SAVE_BEGIN, {}), (Kind.SAVE_END, {"ok": True, "blocked_s": blocked_s})):
                for rank in self._writers(ranks):
                    data = {"path": f"{path}.x" if renamed else path, "format": "torch", **more}
                    data |= {"child": child} if child else {}
                    self._emit(kind, data, attempt, rank, self._local[rank], 0.002)
            if renamed:
                self._emit(Kind.RENAMED, {"path": f"{path}.x", "to": path}, attempt, self._writers(ranks)[0])

    def _resume(self, attempt: int, everyone: range, fresh: _State) -> _State:
        world = self.world
        known = {**DEFECTS, **UNSEEN_DEFECTS}
        defects = [known[name] for name in (world.defect, world.second) if name]
        chosen = self._saved[-1] if self._saved else None
        if chosen and world.defect == "takes an older checkpoint" and len(self._saved) > 1:
            chosen = self._saved[-2]
        files: list[tuple[str, float | None]] = []
        if world.pretrained:
            files.append((world.pretrained, 5000 if "5000" in world.pretrained else None))
        if chosen:
            own = list(chosen.files)[-1:]  # last.pt, if there is one
            if world.named_by == "copy":
                own = [(f"{ROOT}/resume.pt", told) for _path, told in own]
            looked = [self._best_file] if world.best and self._best_file else []
            if world.older and len(self._saved) > 1:  # of which the newer one has overwritten what has its names
                files += [old for old in self._saved[-2].files if old[0] not in dict(chosen.files)]
            files += [*own, *looked] if world.best_last else [*looked, *own]
        if world.loads and files:
            for path, told in files:
                for rank in everyone:
                    data = {"path": path, "format": "torch"}
                    self._emit(Kind.LOAD_BEGIN, data, attempt, rank, self._local[rank], 0.001)
                    ended = {**data, "ok": True, "numbers": {} if told is None else {"step": told}}
                    self._emit(Kind.LOAD_END, ended, attempt, rank, self._local[rank], 0.001)
            self._begins = self._was_handled = True
        self._base, self.resumed = chosen.step if chosen else 0, chosen
        state = _copy(chosen.state) if chosen else fresh
        for defect in defects if chosen else ():
            defect.plant(state, fresh, self._saved[0].state)
        return state

    def _reload(self, attempt: int, ranks: range, state: _State) -> None:
        if not self._saved or not self.world.saves:
            return
        state.weights, state.moments = [*self._saved[0].state.weights], [0.0, 0.0]
        self._begins = self._was_handled = True
        if self.world.loads:
            path, _told = self._saved[0].files[0]
            for kind, more in ((Kind.LOAD_BEGIN, {}), (Kind.LOAD_END, {"ok": True, "numbers": {}})):
                for rank in ranks:
                    data = {"path": path, "format": "torch", **more}
                    self._emit(kind, data, attempt, rank, self._local[rank], 0.001)

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


def _sum_of(value: float) -> list[str]:
    return ["float32 4x4", f"{hash_(repr(value)):016x}"]


def _copy(state: _State) -> _State:
    return replace(state, weights=[*state.weights], draws=[*state.draws], moments=[*state.moments])


def outcome(world: World) -> str:
    """How the history places the steps of this world: "right", "unknown" (some are not placed) or "wrong". They are
    right if all are ahead of the trainer's own count by the same number."""
    run = Trainer(world).run()
    twin = History.of(Trainer(world.straight).run().events) if world.twin else None
    ahead: dict[bool, set[int | None]] = {False: set(), True: set()}  # by whether a rank has a count of its own
    made = History.of(run.events, twin).executions
    for attempt, rank, local, placed in zip(
        *(column.tolist() for column in (made.attempt, made.rank, made.local_step, made.global_step)), strict=True
    ):
        if step := run.truth[attempt, rank, local]:
            apart = world.has_no_common_step and rank == world.ranks_of(attempt) - 1 > 0
            ahead[apart].add(None if placed == UNPLACED else placed - step)
    if any(len(of - {None}) > 1 for of in ahead.values()):
        return "wrong"
    return "unknown" if None in ahead[False] and not world.has_no_common_step else "right"


def planted(number: int, defect: str) -> World:
    """The world of this number as one in which the defect can be found: its data, its state and a twin are seen."""
    drawn_ = drawn(random.Random(number))
    counts = defect.startswith(("schedule", "counter")) or drawn_.schedule == "counted"
    return replace(
        drawn_, ranks=2, ranks_later=0, steps=24, every=min(drawn_.every, 5), kills=(12,), lag=0, warm=0, role=False,
        rounding=False, counter=True, shuffled=True, schedule="counted" if counts else "constant", losses=True,
        samples=True, saves=True, loads=True, state="all", twin=True, swapped=False, uneven="", defect=defect,
    )  # fmt: skip


_HIDDEN_IN = ("loss", "gradients", "update", "data")


def composed(number: int) -> World:
    """The world of this number, with none, one or two defects, in which updates are skipped, samples are drawn or made,
    a number that is not recorded acts, or noise hides small differences."""
    by = random.Random(-number)
    # Data of other ranks can't be told from ranks that changed places.
    known = [name for name in (*DEFECTS, *UNSEEN_DEFECTS) if name != "data of other ranks"]
    defect, second = by.choice(["", *known]), by.choice(["", "", *known])
    both = {defect, second if defect else ""}
    return replace(
        planted(number, defect), second=second if defect else "", state=by.choice(("all", "named", "steps", "none")),
        ranks=by.choice((1, 2, 4)), warm=by.choice((0, 0, 2)), log=by.choice((0, 1)), backwards=by.choice((1, 1, 2)),
        data=by.choice(("loader", "loader", "drawn", "made")), noise=by.random() < 0.2, reloads=False,
        skipping=by.choice(("scaler", "own") if "good of a fresh start" in both else ("", "scaler", "own")),
        hidden=by.choice(_HIDDEN_IN if "hidden of a fresh start" in both else ("", *_HIDDEN_IN)),
    )  # fmt: skip


def truth(world: World) -> tuple[str, set[str]]:
    """What was recorded of the state with which a step begins, and the fields of the state that the resumes did not
    restore as they were saved."""
    found = set[str]()

    class Watched(Trainer):
        def _resume(self, attempt: int, everyone: range, fresh: _State) -> _State:
            state = super()._resume(attempt, everyone, fresh)
            if self.resumed:
                saved = vars(self.resumed.state)
                found.update(name for name, value in vars(state).items() if name != "step" and value != saved[name])
                if (state.opt_step > 0) is not (saved["opt_step"] > 0):  # then none are recorded
                    found.add("moments")
            return state

    Watched(world).run()
    hides = world.changed and world.state == "steps"  # the sums after a step are not those of what is saved
    return "none" if hides else world.state, found


def failures(world: World) -> str:
    """What the assertions say that fail."""
    twins = [Record(PLAN, tuple(Trainer(replace(world.straight, run=number)).run().events), {}) for number in (1, 2)]
    run = Record(PLAN, tuple(Trainer(world).run().events), {})
    by_name = world.state in ("all", "named")
    findings = [of_assertion(each, run, twins[: 1 + world.noise]) for each in ASSERTIONS[not by_name :]]
    return "\n".join(f"{each.reason} {each.cause}" for each in findings if each.outcome is Outcome.FAILED)


def judged(world: World) -> tuple[str, str]:
    """What the assertions say of a world: "cause right", "other cause", "unknown" (none fails, and some are
    inconclusive) or "passed"; and the reasons of those that did not pass."""
    run, twin = (Record(PLAN, tuple(Trainer(each).run().events), {}) for each in (world, world.straight))
    findings = [of_assertion(assertion, run, [twin]) for assertion in ASSERTIONS]
    failed = [found for found in findings if found.outcome is Outcome.FAILED]
    text = "\n".join(f"{found.reason} {found.cause}" for found in failed)
    if failed:
        right = world.defect in DEFECTS and re.search(DEFECTS[world.defect].says, text)
        return "cause right" if right else "other cause", text
    unknown = [found.reason for found in findings if found.outcome is Outcome.INCONCLUSIVE]
    return "unknown" if unknown else "passed", "\n".join(unknown)
