"""The handles of what is changed in a Slurm cluster: work that was given to it, and the states of nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from torchaos.harness.machine.slurm import about_node, ask
from torchaos.harness.undo.touches import Touches

_END_S, _KILL_S = 15.0, 25.0  # seconds for the end by SIGTERM, and then by SIGKILL; Slurm's KillWait is usually 30 s
_LOOK_S = 0.2


@dataclass(frozen=True)
class SlurmWork:
    """The jobs with this name or, if `job` is given, the steps with this name in that job. Undo cancels them, first by
    SIGTERM, after which the agents of the nodes undo everything."""

    kind: ClassVar[str] = "slurm_work"
    name: str
    job: str = ""

    def __post_init__(self) -> None:
        if not self.name or not (self.job.isdigit() or not self.job):
            raise ValueError("work of Slurm can't be found without its name, or with such a job")

    def touches(self) -> Touches:
        return Touches(run_id=self.name)

    def restore(self) -> None:
        for signal, wait_s in ((["--signal=TERM"] if self.job else [], _END_S), ([], _KILL_S)):
            end = time.monotonic() + wait_s
            # A job that is completing may have been requeued, and would start again.
            if ids := self._ids(completing=True):
                ask(["scancel", "--quiet", *signal, *ids])
            while self._ids() and time.monotonic() < end:
                time.sleep(_LOOK_S)
        if left := self._ids():
            raise TimeoutError(f"Slurm has not ended {', '.join(left)} yet")

    def restored(self) -> bool:
        return not self._ids()

    def _ids(self, completing: bool = False) -> list[str]:
        """The ids of the jobs or steps that are left. A job that is completing has ended: Slurm cleans up behind it,
        and a site's Epilog may take minutes. Raises OSError if Slurm does not answer."""
        which = ["--steps", "--jobs", self.job] if self.job else ["--me", "--name", self.name]
        columns = "%i|%j" if self.job else "%i|%j|%T"
        lines = ask(["squeue", "--noheader", f"--format={columns}", *which]).splitlines()
        found = [(*line.strip().split("|"), "")[:3] for line in lines]
        return [id_ for id_, name, state in found if name == self.name and (completing or state != "COMPLETING")]


@dataclass(frozen=True)
class SlurmNodeState:
    """A node that a fault takes out of service, with a reason that names the run. Undo puts the node back, unless it
    has another reason by now. Needs the right to administer the cluster."""

    kind: ClassVar[str] = "slurm_node"
    host: str
    run_id: str

    def __post_init__(self) -> None:
        if not self.run_id or not self.host or self.host.startswith("-"):
            raise ValueError("a node of Slurm can't be put back without its name and the id of the run")

    @property
    def reason(self) -> str:
        return f"torchaos:{self.run_id}"

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def restore(self) -> None:
        if not self.restored():
            ask(["scontrol", "update", f"nodename={self.host}", "state=resume"])

    def restored(self) -> bool:
        return about_node(self.host)[1] != self.reason
