"""A real Slurm cluster of four nodes, each a set of namespaces of this machine: see cluster.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import wait_until

_SCRIPT = Path(__file__).parent / "cluster.sh"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "unshare", "nsenter", "setpriv", "ip")
NODES = 4


@dataclass
class Cluster:
    base: Path

    @property
    def shared(self) -> Path:
        """The folder that all nodes share, and that belongs to the user `trainer`."""
        return self.base / "shared"

    def argv(self, *words: str) -> list[str]:
        return [str(_SCRIPT), str(self.base), *words]

    def popen(self, node: str, *command: str) -> subprocess.Popen[str]:
        """Starts a command as the unprivileged user."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        # By default both are in the user's home, which all nodes share.
        usual = ["-u", "XDG_CACHE_HOME", "-u", "XDG_STATE_HOME"]
        env = ["env", *usual, "-C", str(self.shared), f"PATH={path}", "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1"]
        return subprocess.Popen(
            self.argv("as", node, *env, *command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def as_user(self, *command: str, node: str = "head", timeout_s: float = 170.0) -> tuple[int, str]:
        process = self.popen(node, *command)
        said = process.communicate(timeout=timeout_s)[0]
        return process.returncode, said

    def as_root(self, node: str, *command: str) -> str:
        done = subprocess.run(self.argv("in", node, *command), capture_output=True, text=True, check=False, timeout=60)
        return done.stdout

    def pids(self, node: str, *words: str) -> list[int]:
        """The processes on a node whose command line has all these words, by their pids there."""
        lines = self.as_root(node, "ps", "-ww", "-eo", "pid=,stat=,args=").splitlines()
        living = [line.split(None, 2) for line in lines]
        whole = [one for one in living if len(one) == 3 and "Z" not in one[1]]
        return [int(one[0]) for one in whole if all(word in one[2] for word in words)]

    def state(self, node: str, pid: int) -> str:
        return self.as_root(node, "ps", "-o", "stat=", "-p", str(pid)).strip()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        lacking = ", ".join(missing) or "its programs"
        pytest.skip(f"a Slurm cluster needs root, and {lacking}: apt-get install slurm-wlm munge")
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        pytest.skip("this test's slurm.conf is for cgroups of version 1")
    base = Path(tempfile.mkdtemp(prefix="torchaos-slurm-", dir="/var/tmp"))
    base.chmod(0o755)
    one = Cluster(base)
    here = [str(Path(path).resolve()) for path in (sys.base_prefix, sys.prefix, Path(__file__).parents[2])]
    with open(base / "up.log", "w") as log:
        done = subprocess.run(one.argv("up", str(NODES), *here), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                              check=False, timeout=60)  # fmt: skip
    try:
        if done.returncode:
            pytest.skip(f"namespaces for nodes can't be made here: {(base / 'up.log').read_text()[-300:]}")
        ready = ["sinfo", "--noheader", "--format=%T"]
        wait_until(lambda: one.as_root("head", *ready).split(), lambda states: set(states) == {"idle"})
        yield one
    finally:
        subprocess.run(one.argv("down"), check=False, timeout=60)
        _remove(base)


def _remove(base: Path) -> None:
    end = time.monotonic() + 20.0
    while base.exists() and time.monotonic() < end:  # a namespace that ends may keep a mount for a moment
        shutil.rmtree(base, ignore_errors=True)
