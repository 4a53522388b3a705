"""One resume by forked ranks. It does what torchrun and the engine do in a cold resume, as far as a verdict needs
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

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
        self, parent: Parent, ranks: Sequence[RankCommand], run_id: str, folder: RunDir, goal: Goal, patience_s: float,
        died_in: int = 0, starts: int = 2, anew: bool = False,
    ) -> None:  # fmt: skip
        """`died_in`: the attempt before; `starts`: how often ranks are started as long as they fail; `anew`: each rank
        is a new interpreter."""
        self._starts, self._anew = starts, anew
        self._parent, self._ranks, self._run_id, self._folder = parent, ranks, run_id, folder
        self._goal, self._patience_s = goal, patience_s
        self._stopped = False
        self._hangs, self._attempt = False, died_in
        self._born: dict[int, int] = {}  # start times by pid
        self._of: dict[int, int] = {}  # ranks by pid
        self._codes: dict[int, int] = {}  # exit codes by pid

    def stop(self) -> None:
        self._stopped = True

    def __call__(self, is_untouched: Callable[[], bool] = lambda: False) -> bool:
        """Runs the ranks until they have shown enough, or have ended. Ranks that fail are started again, `starts`
        times in all, unless `is_untouched`: a further start would find the same files. Returns whether they hang.
        Raises ChaosError if the parent is gone."""
        journal = self._journal = Journal(self._folder.events)
        try:
            journal.emit(Kind.STAGE, {"stage": "launch"})
            for submission in range(self._starts):
                self._start(submission)
                try:
                    failed = self._follow(submission)
                finally:
                    proc.end(self._family)
                self._note_ends()
                if not failed or is_untouched():
                    break
            journal.emit(Kind.STAGE, {"stage": "inventory"})
            journal.emit(Kind.STAGE, {"stage": "end"})
            return self._hangs
        finally:
            journal.close()

    def _start(self, submission: int) -> None:
        store, size = self._parent.store(), len(self._ranks)
        port = store or free_port()
        self._attempt += 1
        attempt = self._attempt
        start = {"submission": submission, "pid": self._parent.pid, "node": 0}
        self._journal.emit(Kind.JOB_STARTED, start, attempt=attempt)
        envs = [rank.again(port, bool(store), self._run_id, self._folder.logs, attempt) for rank in self._ranks]
        pids = self._parent.fork(self._ranks, envs, self._folder.logs / f"job-{submission}.log", self._anew)
        self._born, self._of, self._codes = {pid: start_ticks(pid) or 0 for pid in pids}, {}, {}
        for rank, pid in zip(self._ranks, pids, strict=True):
            self._of[pid] = rank.number
            up = {"pid": pid, "start_ticks": self._born[pid], "node": 0}
            where = {"local_rank": int(rank.env["LOCAL_RANK"]), "world_size": size}
            self._journal.emit(Kind.RANK_UP, {**up, **where}, rank=rank.number, attempt=attempt)

    def _family(self) -> dict[int, int]:
        """The ranks and the processes that they have forked: start times by pid."""
        return {pid: ticks for pid, ticks in proc.family(self._run_id).items() if pid != self._parent.pid}

    def _follow(self, submission: int) -> bool:
        """Follows the ranks of one start. Returns whether a rank failed."""
        patience = Patience(self._patience_s, time.monotonic())
        while not self._stopped:
            events = self._journal.snapshot()
            self._note_ends()
            codes = self._codes
            if any(codes.values()) or len(codes) == len(self._born):  # if a rank fails, all others are ended
                code = int(any(codes.values()))
                end = {"submission": submission, "pid": self._parent.pid, "exit_code": code}
                self._journal.emit(Kind.JOB_EXITED, end)
                return bool(code)
            if self._goal.is_reached(events):
                self._emit_stop("the resume went on beyond the death", enough=True)
                return False
            if patience.is_over(events, time.monotonic()):
                self._emit_stop(f"nothing was seen of its ranks for {patience.limit_s:.0f} s")
                self._hangs = True
                return False
            time.sleep(_LOOK_S)
        self._emit_stop("it was interrupted", interrupted=True)
        return False

    def _emit_stop(self, reason: str, interrupted: bool = False, enough: bool = False) -> None:
        self._journal.emit(Kind.STOPPED, {"reason": reason, "interrupted": interrupted, "enough": enough})

    def _note_ends(self) -> None:
        ended = self._parent.ends([pid for pid in self._born if pid not in self._codes])
        self._codes |= ended
        for pid, code in ended.items():
            end = {"pid": pid, "start_ticks": self._born[pid], "exit_code": code}
            self._journal.emit(Kind.RANK_EXITED, end, rank=self._of[pid], attempt=self._attempt)
