"""The harness's side of the parent of warm ranks: its process, and requests to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchaos.harness import agent
from torchaos.harness.agent.wire import ENV_ATTEMPT_BASE, ENV_PLAN, ENV_RUN_ID
from torchaos.harness.contracts import ChaosError
from torchaos.harness.exploring.warm.rank import RankCommand

_SCRIPT = Path(__file__).with_name("parent.py")
_IMPORT_S, _ANSWER_S = 300.0, 60.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # each forked rank sets them itself
_OF_RANKS = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", ENV_PLAN, ENV_ATTEMPT_BASE)


class Parent:
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
        can), and how many of the modules were imported before that was so."""
        answer = self._ask({"do": "import", "names": list(names)})
        if answer["cuda"]:
            return "the imports made a CUDA context, which a forked process can't use", answer["good"]
        if answer["threads"] > 1:
            why = f"the imports started {answer['threads'] - 1} threads, which a forked process would lack"
            return why, answer["good"]
        return "", answer["good"]

    def store(self) -> int:
        """Starts a store of torch.distributed for the next ranks, and ends the store before. Returns its port; 0 if the
        job's Python has no such store."""
        return int(self._ask({"do": "store"})["port"])

    def fork(
        self, ranks: Sequence[RankCommand], envs: Sequence[Mapping[str, str]], log: Path, anew: bool = False
    ) -> list[int]:  # fmt: skip
        """Forks the ranks. Returns their pids. `anew`: each rank is a new interpreter, with nothing imported."""
        folder = str(Path(agent.__path__[0]).resolve())
        asked = [
            {
                "env": dict(env), "argv": list(rank.argv), "cwd": rank.cwd, "log": str(log), "agent": folder,
                "path": rank.cwd if rank.module else os.path.dirname(os.path.join(rank.cwd, rank.argv[0])),
                "module": rank.module, "anew": list(rank.command) if anew else [],
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
