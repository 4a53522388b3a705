"""The command by which the job's launcher starts a rank. It is read from a live rank of a cold resume, and used for
forked ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.agent.wire import ENV_ATTEMPT_BASE, ENV_RUN_ID

_PLAIN = ("-u", "-B", "-s", "-E", "-O", "-OO")  # options of the interpreter without a value


@dataclass(frozen=True)
class RankCommand:
    """The command with which a rank of a cold resume was started."""

    python: str
    options: tuple[str, ...]  # options of the interpreter
    module: str  # the module of `-m`; empty: it is a script
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
        """The environment of this rank in another resume. `port`: that of the store; `served`: the store is there, and
        rank 0 does not serve it."""
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
