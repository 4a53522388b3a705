"""A network namespace, identified by a process in it. The machine's own namespace is never changed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.protocol.wire import start_ticks

TOOL_S = 20.0  # seconds; more than ip, tc or nft ever take


@dataclass(frozen=True)
class NetworkNamespace:
    """The network namespace of the process `pid` that started at `start_ticks` (clock ticks since boot), with its mount
    and host name namespaces. Pid 0 means the calling process. It is used in a pod, where torchaos' agent and its
    reaper are in the pod's network themselves."""

    pid: int
    start_ticks: int

    @property
    def is_here(self) -> bool:
        return self.pid == 0

    @property
    def proc(self) -> Path:
        """The folder in /proc of a process that is in the namespaces."""
        return Path("/proc", "self" if self.is_here else str(self.pid))

    @classmethod
    def of(cls, pid: int) -> NetworkNamespace:
        """The namespace of a process. Raises ProcessLookupError if there is no such process."""
        ticks = start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, ticks)

    def alive(self) -> bool:
        """Whether the process is alive. If not, the namespace is gone, or will be soon."""
        return self.is_here or (start_ticks(self.pid) == self.start_ticks and os.path.exists(self.proc / "ns/net"))

    def enter(self, command: Sequence[str], cwd: Path | None = None) -> list[str]:
        """The command line that runs `command` in this network namespace. With `cwd`, the command also gets the mount
        and host name namespaces, and runs in that folder."""
        if self.is_here:
            return list(command)
        options = ["--net"] if cwd is None else ["--net", "--mount", "--uts", f"--wd={cwd}"]
        if _user_of(self.pid) != _user_of(os.getpid()):
            options = ["--user", "--preserve-credentials", *options]
        return ["nsenter", f"--target={self.pid}", *options, "--", *command]

    def run(self, command: Sequence[str], text: str = "", check: bool = True) -> str:
        """Runs a tool in this namespace with `text` as its input, and returns its standard output. Raises OSError if
        the tool fails, ProcessLookupError if the namespace is gone, PermissionError if it is the machine's own
        namespace."""
        if not self.alive():
            raise ProcessLookupError(f"the network namespace of process {self.pid} is gone")
        if not self.is_here and os.path.samefile(self.proc / "ns/net", "/proc/self/ns/net"):
            raise PermissionError(f"process {self.pid} is in this machine's own network, in which nothing is changed")
        done = subprocess.run(
            self.enter(command), input=text, capture_output=True, text=True, timeout=TOOL_S, check=False
        )
        if check and done.returncode:
            lines = done.stderr.strip().splitlines()
            raise OSError(f"{' '.join(command)}: {lines[0] if lines else f'exit code {done.returncode}'}")
        return done.stdout


def _user_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/user")
    except OSError:
        return ""
