"""One resume by forked ranks: does what torchrun and the engine do in a cold one, as far as a verdict needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchaos.harness.agent.wire import Kind, start_ticks
from torchaos.harness.exploring.goal import Goal, Patience
from torchaos.harness.exploring.warm.parents import Parent
from torchaos.harness.exploring.warm.rank import RankCommand, free_port
from torchaos.harness.machine import proc
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.rundir import RunDir

_LOOK_S = 0.01


class Forked:
    """The ranks of one resume. `stop` may be called from a signal handler."""

    def __init__(
        self, parent: Parent, ranks: Sequence[RankCommand], run_id: str, folder: RunDir, goal: Goal, patience_s: float
    ) -> None:  # fmt: skip
        self._parent, self._ranks, self._run_id, self._folder = parent, ranks, run_id, folder
        self._goal, self._patience_s = goal, patience_s
        self._stopped = False
        self._born: dict[int, int] = {}  # start times by pid
        self._of: dict[int, int] = {}  # ranks by pid

    def stop(self) -> None:
        self._stopped = True

    def __call__(self, take_inventory: Callable[[], None], imports: Path | None) -> bool:
        """Runs the ranks until they have shown enough, or one has ended. True: they hang. Raises ChaosError if the
        parent is gone."""
        journal = self._journal = Journal(self._folder.events)
        try:
            journal.emit(Kind.STAGE, {"stage": "launch"})
            self._start(imports)
            try:
                hung = self._follow()
            finally:
                proc.end(self._family)
            self._note_ends(self._parent.ends(list(self._born)))
            journal.emit(Kind.STAGE, {"stage": "inventory"})
            take_inventory()
            journal.emit(Kind.STAGE, {"stage": "end"})
            return hung
        finally:
            journal.close()

    def _start(self, imports: Path | None) -> None:
        port, size = free_port(), len(self._ranks)
        start = {"submission": 0, "pid": self._parent.pid, "node": 0}
        self._journal.emit(Kind.JOB_STARTED, start, attempt=1)
        envs = [rank.again(port, self._run_id, self._folder.logs) for rank in self._ranks]
        pids = self._parent.fork(self._ranks, envs, self._folder.logs / "job-0.log", imports)
        self._born = {pid: start_ticks(pid) or 0 for pid in pids}
        for rank, pid in zip(self._ranks, pids, strict=True):
            self._of[pid] = rank.number
            up = {"pid": pid, "start_ticks": self._born[pid], "node": 0}
            where = {"local_rank": int(rank.env["LOCAL_RANK"]), "world_size": size}
            self._journal.emit(Kind.RANK_UP, {**up, **where}, rank=rank.number, attempt=1)

    def _family(self) -> dict[int, int]:
        """The ranks and what they have forked: start times by pid."""
        return {pid: ticks for pid, ticks in proc.family(self._run_id).items() if pid != self._parent.pid}

    def _follow(self) -> bool:
        patience, codes = Patience(self._patience_s, time.monotonic()), dict[int, int]()
        while not self._stopped:
            events = self._journal.snapshot()
            ended = self._parent.ends([pid for pid in self._born if pid not in codes])
            self._note_ends(ended)
            codes |= ended
            if any(codes.values()) or len(codes) == len(self._born):  # one that fails takes all others with it
                code = int(any(codes.values()))
                self._journal.emit(Kind.JOB_EXITED, {"submission": 0, "pid": self._parent.pid, "exit_code": code})
                return False
            if self._goal.is_reached(events):
                self._emit_stop("the resume went on beyond the death", enough=True)
                return False
            if patience.is_over(events, time.monotonic()):
                self._emit_stop(f"nothing was seen of its ranks for {patience.limit_s:.0f} s")
                return True
            time.sleep(_LOOK_S)
        self._emit_stop("it was interrupted", interrupted=True)
        return False

    def _emit_stop(self, reason: str, interrupted: bool = False, enough: bool = False) -> None:
        self._journal.emit(Kind.STOPPED, {"reason": reason, "interrupted": interrupted, "enough": enough})

    def _note_ends(self, codes: dict[int, int]) -> None:
        for pid, code in codes.items():
            end = {"pid": pid, "start_ticks": self._born[pid], "exit_code": code}
            self._journal.emit(Kind.RANK_EXITED, end, rank=self._of[pid], attempt=1)
