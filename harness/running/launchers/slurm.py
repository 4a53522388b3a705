"""Nodes of a Slurm cluster. The job is one step with a task on each node, in an allocation: the user's, if torchaos
runs in it, or else the run's own. Slurm's own programs are used, with the rights of the user."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchaos.harness.agent.wire import ENV_RUN_ID
from torchaos.harness.contracts import ChaosError, FarLauncher, Handle, JobSpec, Node, UsageError
from torchaos.harness.undo.slurm import SlurmWork

_SPARE_S = 300.0  # added to the allocation's time limit, after which Slurm ends everything
_QUEUE_S = 24 * 3600.0  # seconds to wait for an allocation
_READY_S = 120.0
_ASK_S = 20.0
_NO_NETWORK = (
    "a Slurm user may not change the network of a node (CAP_NET_ADMIN); write launcher: netns, which makes nodes with "
    "networks of their own on one machine"
)


@dataclass(frozen=True)
class SlurmNode:
    index: int
    host: str
    job: str
    env: Mapping[str, str] = field(default_factory=dict)
    link: ClassVar[None] = None

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command as a step of its own that overlaps with the job's step, even if that step has all processors, all
        memory and all GPUs."""
        return [
            "srun", "--overlap", f"--jobid={self.job}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1",
            f"--nodelist={self.host}", "--mem=0", "--gres=none", "--unbuffered", "--quiet", *command,
        ]  # fmt: skip

    def host_pid(self, pid: int) -> int | None:
        return None


class Slurm(FarLauncher):
    """Inside an allocation (SLURM_JOB_ID), the job is a step of it. Otherwise `salloc` gets an allocation; its options
    come from the user's SALLOC_* variables, and its time limit from the job's time-out."""

    name: ClassVar[str] = "slurm"
    needs: ClassVar[frozenset[str]] = frozenset({"slurm"})
    sets_rendezvous: ClassVar[bool] = True
    on_nodes: ClassVar[bool] = True
    cannot: ClassVar[Mapping[str, str]] = {
        "links": _NO_NETWORK,
        "docker": "the nodes are no containers; write launcher: docker",
        "endpoints": "the nodes do not reach a proxy of the harness's; write launcher: local or netns",
        "node.reboot": "Slurm starts the command on a node only once; write node.freeze or node.kill",
    }

    def __init__(self) -> None:
        self._theirs = os.environ.get("SLURM_JOB_ID", "")
        self._own = ""

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return (SlurmWork(spec.env[ENV_RUN_ID], self._theirs),)

    def create(self, spec: JobSpec) -> Sequence[SlurmNode]:
        """The nodes of the allocation. Raises UsageError if it is too small, ChaosError if Slurm grants no
        allocation."""
        job = self._theirs or self._own
        if not job:
            job = self._own = _allocate(spec)
        _await_ready(job)
        # Sorted by name as text, because torchelastic numbers the nodes in that order too.
        hosts = sorted(
            _ask(["scontrol", "show", "hostnames", _ask(["squeue", "-h", "-j", job, "-o", "%N"]).strip()]).split()
        )
        if len(hosts) < spec.nodes:
            raise UsageError(f"job.nodes wants {spec.nodes} nodes, and allocation {job} has {len(hosts)}")
        return [SlurmNode(index, host, job) for index, host in enumerate(hosts[: spec.nodes])]

    def commands(self, spec: JobSpec, nodes: Sequence[Node], wrapper: Sequence[str]) -> Sequence[Sequence[str]]:
        ours = [node for node in nodes if isinstance(node, SlurmNode)]
        hosts, count = ",".join(node.host for node in ours), len(ours)
        step = [
            "srun", f"--jobid={ours[0].job}", f"--job-name={spec.env[ENV_RUN_ID]}", f"--nodes={count}",
            f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={hosts}", "--no-kill", "--kill-on-bad-exit=0",
            "--unbuffered", "--input=none", *wrapper, "--hosts", hosts, "--", *spec.argv,
        ]  # fmt: skip
        return [step]


def _allocate(spec: JobSpec) -> str:
    """The id of a new allocation, which ends by itself after the job's time-out."""
    minutes = math.ceil((spec.timeout_s + _SPARE_S) / 60)
    argv = [
        "salloc", "--no-shell", "--no-kill", f"--nodes={spec.nodes}", "--ntasks-per-node=1", f"--time={minutes}",
        f"--job-name={spec.env[ENV_RUN_ID]}",
    ]  # fmt: skip
    said = _ask(argv, _QUEUE_S, errors=True)
    if (found := re.search(r"Granted job allocation (\d+)", said)) is None:
        raise ChaosError(f"salloc gave no allocation: {said.strip()[-200:]}")
    return found[1]


def _await_ready(job: str) -> None:
    end = time.monotonic() + _READY_S
    while (state := _ask(["squeue", "-h", "-j", job, "-o", "%T %r"]).strip()) != "RUNNING None":
        if time.monotonic() > end:
            raise ChaosError(f"allocation {job} is not ready: {state or 'it is over'}")
        time.sleep(0.2)


def _ask(argv: Sequence[str], timeout_s: float = _ASK_S, errors: bool = False) -> str:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChaosError(f"{argv[0]}: {error}") from error
    if done.returncode:
        raise ChaosError(f"{argv[0]}: {done.stderr.strip()[-300:] or f'exit code {done.returncode}'}")
    return done.stdout + (done.stderr if errors else "")
