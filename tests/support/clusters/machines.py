"""The machines of a cluster, which a script makes from namespaces; see nodes.sh."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Machines(ABC):
    """`script`: the script of this kind of cluster. `base`: the folder of this cluster."""

    script: Path
    base: Path

    @property
    def shared(self) -> Path:
        """A folder that all nodes share, and that belongs to the user of the tests."""
        return self.base / "shared"

    def argv(self, *words: str) -> list[str]:
        return [str(self.script), str(self.base), *words]

    @abstractmethod
    def popen(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command as the user of the tests, in the shared folder. Its output is a pipe."""

    def as_user(self, *command: str, timeout_s: float = 170.0) -> tuple[int, str]:
        """The exit code and the output of a command of the user."""
        process = self.popen(*command)
        said = process.communicate(timeout=timeout_s)[0]
        return process.returncode, said

    @abstractmethod
    def work(self) -> str:
        """The names of what the cluster runs."""

    def as_root(self, node: str, *command: str, given: str = "") -> str:
        """The output of a command that root runs on a node."""
        done = subprocess.run(
            self.argv("in", node, *command), input=given, capture_output=True, text=True, check=False, timeout=120
        )  # fmt: skip
        return done.stdout

    @contextmanager
    def cut_off(self, node: str) -> Iterator[None]:
        """A context manager in which the network of a node is down."""
        subprocess.run(self.argv("plug", node, "down"), check=True)
        try:
            yield
        finally:
            subprocess.run(self.argv("plug", node, "up"), check=True)

    def pids(self, node: str, *words: str) -> list[int]:
        """The processes on a node whose command line has all these words, by their pids there."""
        lines = self.as_root(node, "ps", "-ww", "-eo", "pid=,stat=,args=").splitlines()
        living = [line.split(None, 2) for line in lines]
        whole = [one for one in living if len(one) == 3 and "Z" not in one[1]]
        return [int(one[0]) for one in whole if all(word in one[2] for word in words)]

    def kill(self, node: str, *groups: Sequence[str]) -> None:
        """Kills processes of a node, all of them at once. Each group is words of a command line, see `pids`."""
        if found := [str(pid) for words in groups for pid in self.pids(node, *words)]:
            self.as_root(node, "kill", "-KILL", *found)

    def states(self, node: str, pids: Sequence[int]) -> dict[int, str]:
        """The states of processes on a node, by pid there. Processes that have ended are left out."""
        said = self.as_root(node, "ps", "-o", "pid=,stat=", "-p", ",".join(map(str, pids))) if pids else ""
        return {int(pid): state for pid, state in (line.split() for line in said.splitlines())}


@contextmanager
def folder_for(kind: str) -> Iterator[Path]:
    """A new folder for a cluster, which is removed at the end."""
    base = Path(tempfile.mkdtemp(prefix=f"torchaos-{kind}-", dir="/var/tmp"))
    base.chmod(0o755)
    try:
        yield base
    finally:
        end = time.monotonic() + 20.0
        while base.exists() and time.monotonic() < end:  # a namespace that ends may keep a mount for a moment
            shutil.rmtree(base, ignore_errors=True)


@contextmanager
def running(one: Machines, *words: str, timeout_s: float) -> Iterator[str]:
    """A context manager in which the machines run; they are started with these words. Yields what went wrong, or an
    empty text."""
    try:
        with open(one.base / "up.log", "w") as log:
            done = subprocess.run(
                one.argv("up", *words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False, timeout=timeout_s
            )  # fmt: skip
        yield (one.base / "up.log").read_text()[-2000:] if done.returncode else ""
    finally:
        subprocess.run(one.argv("down"), check=False, timeout=300)
