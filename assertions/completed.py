"""Did the job end with exit code 0, in the step in which it should end?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.plugin import Assertion, Finding, Harm, Need, Record
from torchaos.plugin.analysis import completion, each


@dataclass(frozen=True)
class Completed(Assertion):
    """The exit code is 0, and the last global step is `steps`, or the twin's last step if `steps` is not given.
    `outputs`: patterns of files below {run}, such as evaluations/*.json; each such file of the twin is there."""

    name = "completed"
    harm = Harm.ENDING
    needs = frozenset({Need.STEPS, Need.TWIN})
    judge_replicas = each

    steps: int | None = None
    outputs: Sequence[str] = ()

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        return completion(run, twins, self.steps, self.outputs)
