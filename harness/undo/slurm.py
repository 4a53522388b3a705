"""The handle of work that was given to Slurm: an allocation, or steps in an allocation of the user."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchaos.harness.undo.touches import Touches

_END_S, _KILL_S = 15.0, 25.0  # seconds for the end by SIGTERM, and then by SIGKILL; Slurm's KillWait is usually 30 s
_LOOK_S = 0.2
_ASK_S = 20.0
_UNKNOWN = "Invalid job id"  # squeue's answer for a job that ended some time ago


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
            if ids := self._ids():
                _slurm(["scancel", *signal, *ids])
            while self._ids() and time.monotonic() < end:
                time.sleep(_LOOK_S)
        if left := self._ids():
            raise TimeoutError(f"Slurm has not ended {', '.join(left)} yet")

    def restored(self) -> bool:
        return not self._ids()

    def _ids(self) -> list[str]:
        """The ids of the jobs or steps that are left. A job that is completing has ended: Slurm cleans up behind it,
        and a site's Epilog may take minutes. Raises OSError if Slurm does not answer."""
        which = ["--steps", "--jobs", self.job] if self.job else ["--me", "--name", self.name]
        columns = "%i|%j" if self.job else "%i|%j|%T"
        lines = _slurm(["squeue", "--noheader", f"--format={columns}", *which]).splitlines()
        found = [(*line.strip().split("|"), "")[:3] for line in lines]
        return [id_ for id_, name, state in found if name == self.name and state != "COMPLETING"]


def _slurm(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{argv[0]} has not answered for {_ASK_S:g} s") from error
    if done.returncode and _UNKNOWN not in done.stderr:
        raise OSError(f"{argv[0]}: {done.stderr.strip()[-200:] or 'it failed'}")
    return "" if done.returncode else done.stdout
