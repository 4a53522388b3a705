"""Whether an attempt began with just what an earlier one had when it did the step that was resumed from. Pure.

It needs no twin, and the number of ranks may change. The check sums (agent/check_sums.py) add up over ranks that share
the parameters, so what eight ranks had can be compared with what six of them put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchaos.harness.agent.check_sums import over_all, plain
from torchaos.harness.judging.checkpoints.kept import sums_at_saves
from torchaos.harness.record.history import Attempt, Execution, History
from torchaos.harness.record.record import Record


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


def resumes_carried(run: Record) -> Iterator[Carried]:
    """One for each attempt that resumed from a step that this run had done, in order of attempt."""
    history = run.history
    for attempt in history.attempts:
        if not attempt.base:
            continue
        first = _of(history, attempt, attempt.base + 1)
        before = [one for one in history.attempts if one.number < attempt.number and _of(history, one, attempt.base)]
        if not first or not before:
            continue
        saver = before[-1]
        saved = _of(history, saver, attempt.base)
        if len(first) != attempt.world_size or len(saved) != saver.world_size:
            yield Carried(attempt, saver, None, None)
        elif _same(first, _of(history, saver, attempt.base + 1)):
            yield Carried(attempt, saver, True, True)
        else:
            restored = _by_rank(first, "restored")
            yield Carried(
                attempt, saver,
                _as_saved(run, saver, attempt.base, restored) or _equal(restored, _by_rank(saved, "parameters")),
                _equal(_by_rank(first, "restored_moments"), _by_rank(saved, "moments")),
            )  # fmt: skip


def _same(ours: Sequence[Execution], theirs: Sequence[Execution]) -> bool:
    """Whether a step that both attempts made led to the same: so both began it with the same. A job may change its
    parameters between a step and the save, which no check sum tells of."""
    names = ("parameters", "moments")
    told = [(_by_rank(ours, name), _by_rank(theirs, name)) for name in names]
    return all(mine == other and None not in mine.values() for mine, other in told)


def _as_saved(run: Record, saver: Attempt, step: int, restored: Mapping[int, str | None]) -> bool:
    """Whether the parameters are those that a save began with, which a job may have changed since the step."""
    total, saved = over_all(list(restored.values())), sums_at_saves(run, saver.number, step)
    return total is not None and bool(saved) and plain(total) in saved


def _of(history: History, attempt: Attempt, step: int) -> list[Execution]:
    return [one for one in history.executions if one.attempt == attempt.number and one.global_step == step]


def _by_rank(executions: Sequence[Execution], name: str) -> dict[int, str | None]:
    return {one.rank: getattr(one, name) for one in executions}


def _equal(ours: Mapping[int, str | None], theirs: Mapping[int, str | None]) -> bool | None:
    """By the sums over the ranks. Where these mean nothing, only that each rank has what it had can be told."""
    mine, other = over_all(list(ours.values())), over_all(list(theirs.values()))
    if mine is None or other is None:
        return True if ours == theirs and None not in ours.values() else None
    return mine == other
