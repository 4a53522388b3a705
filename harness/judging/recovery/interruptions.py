"""The times in which a job was recovering. Faults whose recoveries overlap interrupted the job once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.harness.judging.checkpoints.standstill import standstill
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Recovery


@dataclass(frozen=True)
class Interruption:
    """From a fault until the job had recovered from it and from all faults that came meanwhile (CLOCK_MONOTONIC)."""

    begun_s: float
    ended_s: float
    recoveries: tuple[Recovery, ...]

    @property
    def took_s(self) -> float:
        return self.ended_s - self.begun_s

    @property
    def restarted_after_s(self) -> float | None:
        """The seconds until the first step of its last restart. None if the job went on without a restart, or if
        nothing shows where it resumed."""
        back = [
            _at(one) + at for one in self.recoveries if one.lost_steps is not None and (at := one.parts["first_step"])
        ]
        return max(back) - self.begun_s if back else None


def interruptions(run: Record, found: Sequence[Recovery]) -> list[Interruption]:
    """The interruptions by these recoveries, in order of time. A recovery that never ended lasts until the run's last
    event."""
    over_s = run.events[-1].mono_s if run.events else 0.0
    merged: list[Interruption] = []
    for one in sorted(found, key=_at):
        took_s = one.parts["caught_up"]
        now = Interruption(_at(one), max(_at(one), over_s) if took_s is None else _at(one) + took_s, (one,))
        if merged and now.begun_s <= merged[-1].ended_s:
            last = merged.pop()
            now = Interruption(last.begun_s, max(last.ended_s, now.ended_s), (*last.recoveries, one))
        merged.append(now)
    return merged


def invalid_s(run: Record, found: Sequence[Interruption]) -> float:
    """The seconds in which training was interrupted, or stood still to write a checkpoint. A checkpoint that is written
    in an interruption counts only once."""
    begun: dict[tuple[int, int], float] = {}
    for save in run.history.saves:
        key = (save.attempt, save.local_step)
        begun[key] = min(begun.get(key, save.begun_s), save.begun_s)
    outside = (
        blocked for key, blocked in standstill(run.history).blocked.items()
        if not any(one.begun_s <= begun[key] < one.ended_s for one in found)
    )  # fmt: skip
    return sum(one.took_s for one in found) + sum(outside)


def _at(recovery: Recovery) -> float:
    return recovery.at_s or 0.0
