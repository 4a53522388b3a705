"""Asks the observers ten times a second, and emits events: for each change of an opinion, for a suspicion, and for a
hang with its culprits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchaos.harness.interfaces import Emit, Need, RankProcess
from torchaos.harness.monitoring.diagnosis import live_job
from torchaos.harness.monitoring.diagnosis.live_job import find_py_spy
from torchaos.harness.monitoring.observers.nccl_ras import NcclRas
from torchaos.harness.monitoring.observers.opinions import LogSilence, Opinion, Overdue, Rule, Stagnation, Tick
from torchaos.harness.monitoring.observers.resource_use import Idle, spinning
from torchaos.harness.monitoring.probes.gpu_probe import Sample
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir

_SILENT_START_S = 30.0  # after this time, a job without output counts as training
_LATE_S = 1.0  # after a longer time without a look, as on a busy machine, nothing is learned as usual
_LINES = 5  # a job whose log has grown more often than this counts as training


class HangWatch:
    """A probe that declares hangs. `ranks`: returns the live ranks. `logs`: returns the files of the job's output.
    `stamps`: the folder of the agent's stamps; None without an agent. `record`: receives all opinions. `gpus`: returns
    the newest samples of each GPU. `py_spy`: finds the program that reads stacks."""

    period_s = 0.1

    def __init__(
        self, ranks: Callable[[], Mapping[int, RankProcess]], logs: Callable[[], Sequence[Path]],
        stamps: Path | None, record: Callable[[Tick], None] | None = None,
        gpus: Callable[[], Mapping[int, Sequence[Sample]]] = dict, py_spy: Callable[[], str | None] = find_py_spy,
    ) -> None:  # fmt: skip
        self._ranks, self._logs, self._stamps, self._record, self._gpus = ranks, logs, stamps, record, gpus
        self._py_spy = py_spy
        self._rule = Rule()
        self._pids: set[int] = set()
        self._looked_s = 0.0
        self._said: dict[str, str] = {}  # the last opinion of each observer that was recorded, in a word
        self._most = 0  # the most ranks that were seen at once; ranks on other machines are never seen
        self._reset(0.0)

    def _reset(self, now_s: float) -> None:
        """Forgets everything that was learned, because the processes have changed."""
        self._log, self._idle, self._stacks = LogSilence(self._logs), Idle(), Stagnation(self._py_spy)
        self._ras = NcclRas()
        self._overdue = Overdue(self._stamps) if self._stamps else None
        self._since_s, self._suspected, self._declared = now_s, False, False
        self._lines, self._size = 0, -1

    def sample(self, emit: Emit) -> None:
        ranks = list(self._ranks().values())
        now = time.monotonic()
        pids = {rank.pid for rank in ranks}
        if pids != self._pids:
            self._pids = pids
            self._reset(now)
        world, self._most = max((rank.world_size for rank in ranks), default=0), max(self._most, len(ranks))
        if not ranks or len(ranks) < min(world, self._most):  # the job starts, ends or restarts
            return
        opinions = self._look(now, ranks, now - self._looked_s < _LATE_S)
        self._looked_s = time.monotonic()
        if self._record:
            self._record(Tick(now, tuple(opinions)))
        self._tell(opinions, emit, ranks, now)

    def _look(self, now: float, ranks: Sequence[RankProcess], in_time: bool) -> list[Opinion]:
        training = self._is_training(now)
        learns = training and in_time
        opinions = [self._log.look(now, learns)]
        if self._overdue:
            opinions.append(self._overdue.look(now, learns))
        metrics = self._idle.look(now, learns, ranks, late=bool(self._rule.suspects(opinions)))
        opinions.append(metrics)
        if not training:
            return []
        wanted = bool(self._rule.suspects(opinions))
        working = metrics.quiet_s < 0.3
        opinions.append(self._stacks.look(now, wanted, working, ranks))
        if ras := self._ras.look(now, wanted, ranks):
            opinions.append(ras)
        return opinions

    def _is_training(self, now: float) -> bool:
        if self._overdue and self._overdue.training:
            return True
        size = sum(path.stat().st_size for path in self._logs() if path.exists())
        self._lines += size != self._size
        self._size = size
        return self._lines > _LINES or now - self._since_s > _SILENT_START_S

    def _tell(self, opinions: Sequence[Opinion], emit: Emit, ranks: Sequence[RankProcess], now: float) -> None:
        for opinion in opinions:
            if self._said.get(opinion.observer) != (word := self._rule.word(opinion, opinions)):
                self._said[opinion.observer] = word
                emit(Kind.HANG_OPINION, {"opinion": word, **self._values(opinion, opinions)})
        suspects = self._rule.suspects(opinions)
        if not suspects:
            self._suspected = self._declared = False
            return
        if not self._suspected:
            self._suspected = True
            first = max(suspects, key=lambda opinion: opinion.quiet_s)
            data = {"observer": first.observer, "ranks": [], "since_s": now - first.quiet_s, "detail": first.detail}
            emit(Kind.HANG_SUSPECTED, data)
        agreed = self._rule.agree(opinions)
        if agreed and not self._declared:
            self._declared = True
            since = now - max(opinion.quiet_s for opinion in agreed)
            by_rank = {rank.rank: rank for rank in ranks}
            diagnosis = live_job.diagnose(by_rank, stamps=self._stamps, hangs=True, py_spy=self._py_spy)
            for rank, words in (*spinning(self._gpus(), since), *self._ras.words(ranks).items()):
                diagnosis.say(rank, words)
            found = diagnosis.to_json()
            emit(Kind.HANG_DECLARED, {
                "observers": sorted(sure.observer for sure in agreed), "ranks": found["culprits"], "since_s": since,
                "declared_s": now, "bound_s": max(self._rule.bound_s(sure, opinions) for sure in agreed), **found,
                "opinions": [self._values(opinion, opinions) for opinion in opinions],
            })  # fmt: skip

    def _values(self, opinion: Opinion, opinions: Sequence[Opinion]) -> dict[str, Any]:
        """An opinion as data of an event; times in seconds."""
        return {
            "observer": opinion.observer, "quiet_s": round(opinion.quiet_s, 3),
            "bound_s": round(self._rule.bound_s(opinion, opinions), 3), "detail": opinion.blind or opinion.detail,
            **({"ranks": list(opinion.ranks)} if opinion.ranks else {}),
        }  # fmt: skip


class Watching:
    """Runs the probe in a thread of its own. Does nothing if there is no probe."""

    def __init__(self, probe: HangWatch | None, emit: Emit) -> None:
        self._probe, self._emit = probe, emit
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hangs", daemon=True)
        self._noted: set[str] = set()
        self.cpu_s = 0.0  # CPU seconds of the thread, without the programs that it starts (py-spy, ss)

    def start(self) -> None:
        if self._probe:
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        while self._probe and not self._ended.wait(self._probe.period_s):
            try:
                self._probe.sample(self._emit)
            except (OSError, ValueError, KeyError) as error:  # a process or file has just disappeared
                if not self._ended.is_set():
                    self._note(f"the hang observers missed a look: {type(error).__name__}: {error}")
            self.cpu_s = time.thread_time()

    def _note(self, text: str) -> None:
        if text not in self._noted and len(self._noted) < 5:
            self._noted.add(text)
            self._emit(Kind.NOTE, {"text": text})


def hangs_of(
    plan: Plan, folder: RunDir, ranks: Callable[[], Mapping[int, RankProcess]], emit: Emit,
    gpus: Callable[[], Mapping[int, Sequence[Sample]]],
) -> Watching:  # fmt: skip
    """The hang observers of a run. They do nothing if no assertion needs them."""
    if Need.HANGS not in plan.collect:
        return Watching(None, emit)
    stamps = None if plan.job.attached else folder.stamps
    return Watching(HangWatch(ranks, lambda: sorted(folder.logs.glob("*.log")), stamps, gpus=gpus), emit)
