"""How the job's launcher starts its ranks: read from a live rank of a cold resume, and given to forked ranks."""

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
    """What one rank of a cold resume was started with."""

    python: str
    options: tuple[str, ...]  # of the interpreter
    module: str  # of `-m`; empty: a script
    argv: tuple[str, ...]  # the script, or the module's name, and its arguments
    cwd: str
    env: Mapping[str, str]

    @classmethod
    def of(cls, pid: int) -> RankCommand:
        """Raises OSError if the process is gone, and ValueError if it is not a Python that runs a script."""
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
    def number(self) -> int:
        return int(self.env["RANK"])

    def again(self, port: int, run_id: str, errors: Path, attempt: int) -> dict[str, str]:
        """The environment of a rank of another resume. Its rank 0 keeps the store that torchrun's agent keeps
        otherwise."""
        return {
            **self.env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_ERROR_FILE": str(errors / f"error-{self.number}.json"),
            ENV_RUN_ID: run_id, ENV_ATTEMPT_BASE: str(attempt),
        }  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
