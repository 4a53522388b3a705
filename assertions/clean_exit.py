"""Did the job leave anything behind when it ended: a process, a port, shared memory, GPU memory?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import as_one, leftovers


@dataclass(frozen=True)
class CleanExit(Assertion):
    """A few seconds after the command has ended by itself, nothing of the job is left. Fails also if the job makes its
    last step and then does not end."""

    name = "clean_exit"
    harm = Harm.ENDING
    needs = frozenset({Need.STEPS, Need.LEFTOVERS, Need.TWIN})
    judge_replicas = as_one

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return leftovers(run, twins)
