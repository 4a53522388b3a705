"""A node of an allocation, and the orders that a user may give Slurm about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchaos.harness.machine.slurm import about_job, about_node, ask, hosts_of


@dataclass(frozen=True)
class SlurmNode:
    """`step`: the name of the job's step. `restarts`: how often Slurm had started the allocation again. The methods
    that ask Slurm raise OSError if it refuses or does not answer."""

    index: int
    host: str
    job: str
    step: str = ""
    restarts: str = "0"
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

    def over(self) -> bool:
        """Whether Slurm says that the job's step does not run on this node any more."""
        about = about_job(self.job)
        if about.get("JobState") != "RUNNING" or about.get("Restarts", "0") != self.restarts:
            return True
        return self.host not in hosts_of(about.get("NodeList", "")) or not self._steps()

    def state(self) -> str:
        """The state of the node, such as allocated or draining."""
        return about_node(self.host)[0]

    def cancel_step(self, signal: str) -> None:
        steps = self._steps()
        if not steps:
            raise OSError("the job's step had ended before the fault could hit it")
        ask(["scancel", f"--signal={signal}", *steps])

    def requeue(self) -> None:
        ask(["scontrol", "requeue", self.job])

    def take_out(self, state: str, reason: str) -> None:
        """Sets the node's state. Raises OSError if it is out of service already, because then it is not ours to put
        back."""
        now, why = about_node(self.host)
        if why:
            raise OSError(f"node {self.host} is {now} already, with the reason: {why}")
        ask(["scontrol", "update", f"nodename={self.host}", f"state={state}", f"reason={reason}"])

    def displace(self, name: str, partition: str, time_s: float) -> None:
        """Submits a job that takes the whole node for some seconds."""
        ask([
            "sbatch", "--parsable", f"--job-name={name}", f"--partition={partition}", f"--nodelist={self.host}",
            "--nodes=1", "--exclusive", f"--time={math.ceil(time_s / 60) + 1}", "--output=/dev/null", "--no-requeue",
            f"--wrap=sleep {time_s:g}",
        ])  # fmt: skip

    def _steps(self) -> list[str]:
        lines = ask(["squeue", "--noheader", "--steps", "--jobs", self.job, "--format=%i|%j"]).splitlines()
        found = (line.strip().partition("|") for line in lines)
        return [id_ for id_, _, name in found if name == self.step]
