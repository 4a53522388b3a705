"""A real Slurm cluster of four nodes, each a set of namespaces of this machine: see slurm.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import wait_until

from clusters.machines import Machines, folder_for, running
from clusters.runs import ClusterRun

_SCRIPT = Path(__file__).with_name("slurm.sh")
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "unshare", "nsenter", "setpriv", "ip")
_ROOT = Path(__file__).parents[3]
NODES = 4


class Slurm(Machines):
    """The nodes `head`, and `n1`, `n2`, ..."""

    def popen(self, *command: str, node: str = "head", user: str = "as") -> subprocess.Popen[str]:
        """Starts a command as the unprivileged user, or as root if `user` is `in`."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        # By default both are in the user's home, which all nodes share.
        usual = ["-u", "XDG_CACHE_HOME", "-u", "XDG_STATE_HOME"]
        own = [f"PATH={path}", "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1"]
        if user == "in":
            own.append(f"HOME={self.base}/admin")
        return subprocess.Popen(
            self.argv(user, node, "env", *usual, "-C", str(self.shared), *own, *command), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def state(self, node: str) -> str:
        """The state of a node and the reason for it, in Slurm's words."""
        return self.as_root(
            "head", "sinfo", "--noheader", f"--nodes={node}", "--partition=main", "--format=%T|%E"
        ).strip()

    def crash(self, node: str) -> None:
        """Ends everything on a node at once, as a loss of power does."""
        subprocess.run(self.argv("crash", node), check=True, timeout=300)

    def boot(self, node: str) -> None:
        """Starts a node that crashed, and puts it back into service as an administrator does."""
        subprocess.run(self.argv("boot", node), check=True, timeout=300)
        wait_until(lambda: not self._answers_not(node), timeout_s=60)
        self.as_root("head", "scontrol", "update", f"nodename={node}", "state=resume")
        wait_until(lambda: not self._answers_not(node) and not self.state(node).startswith("down"), timeout_s=60)

    def _answers_not(self, node: str) -> bool:
        return self.state(node).partition("|")[0].endswith("*")

    def work(self) -> str:
        """The names of the jobs that Slurm has."""
        return self.as_root("head", "squeue", "--noheader", "--format=%j")


class SlurmRun(ClusterRun):
    """`user`: how torchaos is started, see `Slurm.popen`. `env`: more of its environment."""

    launcher = "slurm"
    nodes: Sequence[str] = ("head", "n1", "n2", "n3", "n4")

    def __init__(self, cluster: Slurm, name: str, *faults: Any, user: str = "as", env: Sequence[str] = (), **more: Any):
        self._user, self.env = user, env
        super().__init__(cluster, name, *faults, **more)

    def begin(self) -> subprocess.Popen[str]:
        command = ["env", *self.env, "torchaos", "run", str(self.file), "--out", "runs"]
        started: subprocess.Popen[str] = self.cluster.popen(*command, user=self._user)
        return started

    def is_clean(self) -> None:
        """Also no node keeps an undo log."""
        super().is_clean()
        for node in self.nodes:
            logs = f"ls -d /tmp/torchaos-*/*{self.name}-s0*/undo 2>/dev/null"
            assert not self.cluster.as_root(node, "sh", "-c", logs), node


def missing() -> str:
    """What this machine lacks for such a cluster, or an empty text."""
    lacks = [name for name in _PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or lacks:
        return f"a Slurm cluster needs root, and {', '.join(lacks) or 'its programs'}: apt-get install slurm-wlm munge"
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        return "the slurm.conf of the tests is for cgroups of version 1"
    return ""


@contextmanager
def cluster(nodes: int = NODES) -> Iterator[Slurm]:
    """A context manager in which a cluster runs; several may run at once. Raises OSError if this machine allows no
    such namespaces."""
    with folder_for("slurm") as base:
        one = Slurm(_SCRIPT, base)
        here = [str(Path(path).resolve()) for path in (sys.base_prefix, sys.prefix, _ROOT)]
        with running(one, str(nodes), *here, timeout_s=60) as wrong:
            if wrong:
                raise OSError(f"namespaces for nodes can't be made here: {wrong}")
            ready = ["sinfo", "--noheader", "--format=%T"]
            wait_until(lambda: one.as_root("head", *ready).split(), lambda states: set(states) == {"idle"})
            yield one
