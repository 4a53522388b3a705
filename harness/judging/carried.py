"""Whether an attempt began with just what an earlier one had when it did the step that was resumed from. Pure.

It needs no twin, and the number of ranks may change. The check sums (agent/check_sums.py) add up over ranks that share
the parameters, so what eight ranks had can be compared with what six of them put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchaos.harness.agent.check_sums import over_all
from torchaos.harness.history import Attempt, Execution, History


@dataclass(frozen=True)
class Carried:
    """One resume: what came over it. None: it can't be told."""

    attempt: Attempt
    saver: Attempt  # the last attempt before it that did the step that it resumed from
    parameters: bool | None
    moments: bool | None

    @property
    def step(self) -> int:
        return self.attempt.base or 0

    @property
    def resized(self) -> bool:
        return self.attempt.world_size != self.saver.world_size

    @property
    def lost(self) -> list[str]:
        told = (("parameters", self.parameters), ("moments of the optimizer", self.moments))
        return [what for what, kept in told if kept is False]

    @property
    def in_words(self) -> str:
        worlds = f"{self.saver.world_size} ranks", f"{self.attempt.world_size} ranks"
        sizes = f" (then {worlds[0]}, now {worlds[1]})" if self.resized else ""
        return f"the resume from step {self.step} in attempt {self.attempt.number}{sizes}"


def resumes_carried(history: History) -> Iterator[Carried]:
    """One for each attempt that resumed from a step that this run had done, in order of attempt."""
    for attempt in history.attempts:
        if not attempt.base:
            continue
        first = _of(history, attempt, attempt.base + 1)
        before = [one for one in history.attempts if one.number < attempt.number and _of(history, one, attempt.base)]
        if not first or not before:
            continue
        saver = before[-1]
        saved = _of(history, saver, attempt.base)
        whole = len(first) == attempt.world_size and len(saved) == saver.world_size
        yield Carried(
            attempt, saver,
            _equal([one.restored for one in first], [one.parameters for one in saved]) if whole else None,
            _equal([one.restored_moments for one in first], [one.moments for one in saved]) if whole else None,
        )  # fmt: skip


def _of(history: History, attempt: Attempt, step: int) -> list[Execution]:
    return [one for one in history.executions if one.attempt == attempt.number and one.global_step == step]


def _equal(ours: Sequence[str | None], theirs: Sequence[str | None]) -> bool | None:
    mine, other = over_all(ours), over_all(theirs)
    return None if mine is None or other is None else mine == other
