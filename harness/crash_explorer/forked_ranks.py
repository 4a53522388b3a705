"""Resumes a job with forked ranks: reads a rank's command from a live rank of a cold resume, asks the fork server for
ranks, and does the part of torchrun's and the engine's work that a verdict needs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchaos.harness import agent
from torchaos.harness.crash_explorer.resume_runs import Patience, StopRule
from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.wire import ENV_ATTEMPT_BASE, ENV_PLAN, ENV_RUN_ID, Kind, start_ticks
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.rundir import RunDir

_PLAIN = ("-u", "-B", "-s", "-E", "-O", "-OO")  # options of the interpreter without a value


@dataclass(frozen=True)
class RankCommand:
    """The command with which a rank of a cold resume was started."""

    python: str
    options: tuple[str, ...]  # options of the interpreter
    module: str  # the module after `-m`; empty: a script is run
    argv: tuple[str, ...]  # the script, or the module's name, and its arguments
    cwd: str
    env: Mapping[str, str]

    @classmethod
    def of(cls, pid: int) -> RankCommand:
        """The command of a live process. Raises OSError if the process is gone, and ValueError if it is not a Python
        that runs a script."""
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")[:-1]
        pairs = (line.partition("=") for line in os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0"))
        env = {name: value for name, equals, value in pairs if equals}
        at = 1
        while at < len(words) and words[at] in _PLAIN:
            at += 1
        module = words[at + 1] if words[at : at + 1] == ["-m"] and len(words) > at + 1 else ""
        rest = words[at + 1 :] if module else words[at:]
        if not rest or "python" not in os.path.basename(words[0]) or rest[0].startswith("-"):
            raise ValueError(f"its ranks are started by {' '.join(words[:3])}, which is no Python script")
        return cls(words[0], tuple(words[1:at]), module, tuple(rest), os.readlink(f"/proc/{pid}/cwd"), env)

    @property
    def command(self) -> tuple[str, ...]:
        return (self.python, *self.options, *(["-m"] if self.module else []), *self.argv)

    @property
    def number(self) -> int:
        return int(self.env["RANK"])

    def again(self, port: int, served: bool, run_id: str, errors: Path, attempt: int) -> dict[str, str]:
        """The environment of this rank in another resume. `port`: the port of the store. `served`: whether the store is
        already there, so that rank 0 does not serve it."""
        return {
            **self.env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": str(served), "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_ERROR_FILE": str(errors / f"error-{self.number}.json"),
            ENV_RUN_ID: run_id, ENV_ATTEMPT_BASE: str(attempt),
        }  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


_SCRIPT = Path(__file__).with_name("fork_server.py")
_IMPORT_S, _ANSWER_S = 300.0, 60.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # each forked rank sets them itself
_OF_RANKS = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", ENV_PLAN, ENV_ATTEMPT_BASE)


class ForkServer:
    """One parent process. Its ranks die with it, and it ends when its socket is closed."""

    def __init__(self, rank: RankCommand, run_id: str, log: Path) -> None:
        """Starts the parent. Raises ChaosError if it can't be started."""
        env = {name: value for name, value in rank.env.items() if name not in _OF_RANKS}
        env |= {name: "1" for name in _THREADS if name in env}  # otherwise the import of torch starts threads
        ours, theirs = socket.socketpair()
        ours.settimeout(_IMPORT_S)
        argv = [rank.python, *rank.options, str(_SCRIPT), str(theirs.fileno())]
        try:
            with theirs, open(log, "ab") as output:
                self._process = subprocess.Popen(
                    argv, cwd=rank.cwd, env={**env, ENV_RUN_ID: run_id}, pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise ChaosError(f"{rank.python}: the parent of warm ranks can't be started: {error.strerror}") from error
        self._sock, self._lines = ours, ours.makefile("rb")

    @property
    def pid(self) -> int:
        return self._process.pid

    def imports(self, names: Sequence[str]) -> tuple[str, int]:
        """Imports the modules in the parent. Returns why ranks can't be forked afterwards, as a clause (empty if they
        can), and how many of the modules were imported until then."""
        answer = self._ask({"do": "import", "names": list(names)})
        if answer["cuda"]:
            return "the imports made a CUDA context, which a forked process can't use", answer["good"]
        if answer["threads"] > 1:
            why = f"the imports started {answer['threads'] - 1} threads, which a forked process would lack"
            return why, answer["good"]
        return "", answer["good"]

    def store(self) -> int:
        """Ends the previous store, and starts a store of torch.distributed for the next ranks. Returns its port; 0 if
        the job's Python has no such store."""
        return int(self._ask({"do": "store"})["port"])

    def fork(
        self, ranks: Sequence[RankCommand], envs: Sequence[Mapping[str, str]], log: Path, new_interpreters: bool = False
    ) -> list[int]:  # fmt: skip
        """Forks the ranks, and returns their pids. `new_interpreters`: each rank then becomes a new interpreter, with
        nothing imported."""
        folder = str(Path(agent.__path__[0]).resolve().parent)
        asked = [
            {
                "env": dict(env), "argv": list(rank.argv), "cwd": rank.cwd, "log": str(log), "agent": folder,
                "path": rank.cwd if rank.module else os.path.dirname(os.path.join(rank.cwd, rank.argv[0])),
                "module": rank.module, "anew": list(rank.command) if new_interpreters else [],
            }
            for rank, env in zip(ranks, envs, strict=True)
        ]  # fmt: skip
        return [int(pid) for pid in self._ask({"do": "fork", "ranks": asked})["pids"]]

    def ends(self, pids: Sequence[int]) -> dict[int, int]:
        """The exit codes of the ranks that have ended since the last call, by pid. Negative: a signal."""
        return {int(pid): code for pid, code in self._ask({"do": "ends", "pids": list(pids)})["codes"].items()}

    def close(self) -> None:
        self._sock.close()
        self._lines.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        try:
            self._sock.sendall(json.dumps(request).encode() + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise ChaosError(f"the parent of warm ranks does not answer: {error}") from error
        if not line:
            raise ChaosError(f"the parent of warm ranks has ended with exit code {self._process.wait()}")
        return json.loads(line)


_LOOK_S = 0.01


class ForkedResume:
    """The ranks of one resume. `stop` may be called from a signal handler."""

    def __init__(
        self,
        parent: ForkServer,
        ranks: Sequence[RankCommand],
        run_id: str,
        folder: RunDir,
        stop_rule: StopRule,
        patience_s: float,
        died_in_attempt: int = 0,
        starts: int = 2,
        new_interpreters: bool = False,
    ) -> None:
        """`died_in_attempt`: the number of the attempt that died. `starts`: how often failing ranks are started, at
        most. `new_interpreters`: whether each rank is a new interpreter."""
        self._starts, self._new_interpreters = starts, new_interpreters
        self._parent, self._ranks, self._run_id, self._folder = parent, ranks, run_id, folder
        self._stop_rule, self._patience_s = stop_rule, patience_s
        self._stopped = False
        self._hangs, self._attempt = False, died_in_attempt
        self._born: dict[int, int] = {}  # start times by pid
        self._of: dict[int, int] = {}  # ranks by pid
        self._codes: dict[int, int] = {}  # exit codes by pid

    def stop(self) -> None:
        self._stopped = True

    def __call__(self, is_untouched: Callable[[], bool] = lambda: False) -> bool:
        """Runs the ranks until they have shown enough, or have ended. Returns whether they hang. Ranks that fail are
        started again, at most `starts` times in all; not if `is_untouched`, because they would find the same files.
        Raises ChaosError if the parent is gone."""
        journal = self._journal = Journal(self._folder.events)
        try:
            journal.emit(Kind.STAGE, {"stage": "launch"})
            for submission in range(self._starts):
                self._start(submission)
                try:
                    failed = self._follow(submission)
                finally:
                    processes.end(self._family)
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
        pids = self._parent.fork(self._ranks, envs, self._folder.logs / f"job-{submission}.log", self._new_interpreters)
        self._born, self._of, self._codes = {pid: start_ticks(pid) or 0 for pid in pids}, {}, {}
        for rank, pid in zip(self._ranks, pids, strict=True):
            self._of[pid] = rank.number
            up = {"pid": pid, "start_ticks": self._born[pid], "node": 0}
            where = {"local_rank": int(rank.env["LOCAL_RANK"]), "world_size": size}
            self._journal.emit(Kind.RANK_UP, {**up, **where}, rank=rank.number, attempt=attempt)

    def _family(self) -> dict[int, int]:
        """The start times, by pid, of the ranks and of the processes that they have forked."""
        return {pid: ticks for pid, ticks in processes.family(self._run_id).items() if pid != self._parent.pid}

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
            if self._stop_rule.is_reached(events):
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
