"""The files that a job still had to save when a fault came after its last step."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.record.history import History, Save
from torchaos.harness.record.history.checkpoints import final_path


def owed(history: History, at_s: float, twins: Sequence[History]) -> frozenset[str]:
    """The files that the first twin saved after its last step and that this run had not completely saved at `at_s`
    (CLOCK_MONOTONIC). Empty if the run had not done its last step at that time, or made a step later; then steps show
    when the job continued."""
    last = twins[0].last_step if twins else None
    if last is None or not last == history.highest_step(before_s=at_s) == history.highest_step():
        return frozenset()
    wanted = {_name(save) for save in twins[0].saves if save.ok and save.global_step == last}
    return frozenset(wanted - {_name(save) for save in history.saves if _is_whole(save, last, 0.0, at_s)})


def made_good_s(history: History, at_s: float, names: frozenset[str]) -> float | None:
    """The time (CLOCK_MONOTONIC) at which the last of these files was complete. None if one of them never was
    complete."""
    last = history.highest_step() or 0
    ends: dict[str, float] = {}
    for save in history.saves:
        if _is_whole(save, last, at_s, float("inf")):
            ends.setdefault(_name(save), save.ended_s or 0.0)
    return max((ends[name] for name in names), default=None) if names <= ends.keys() else None


def _is_whole(save: Save, step: int, since_s: float, until_s: float) -> bool:
    return save.ok and save.global_step == step and save.ended_s is not None and since_s < save.ended_s <= until_s


def _name(save: Save) -> str:
    """The last two parts of the path. The rest differs, because a run and its twin have different folders."""
    return "/".join(final_path(save.path).split("/")[-2:])
