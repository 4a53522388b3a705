"""Finds ranks that resumed from a checkpoint of another step than the rest of the job. This happens if each rank takes
its own newest file. A rank may load an older file and then get the state of another rank. The optimizer's own counter
shows which state a rank continued with."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.harness.record.history import Segment
from torchaos.harness.record.history.evidence import OPTIMIZER, RECORD, Witness


@dataclass(frozen=True)
class Apart:
    """Ranks that loaded a checkpoint of another step than the one that the job continued from."""

    ranks: tuple[int, ...]
    step: int  # global: the step of their checkpoint
    rests_on: str
    sure: bool  # their optimizer's counter agrees with the checkpoint, too


def apart(part: Segment) -> Apart | None:
    """The ranks that resumed from another step than the rest, from the first such resume; a resume that is sure comes
    before one that is not. None if all ranks resumed from the same step, as far as was seen."""
    if part.base is None:
        return None
    found = [
        _of(record, part.base, part.witnesses)
        for record in part.witnesses
        if record.name == RECORD and record.value is not None and part.base not in record.fits
    ]
    told = [candidate for candidate in found if candidate is not None]
    return max(told, key=lambda candidate: candidate.sure, default=None)


def _of(record: Witness, base: int, witnesses: tuple[Witness, ...]) -> Apart | None:
    """The ranks that loaded a checkpoint of another step. None if the counters of all these ranks show that they got
    the state of the other ranks."""
    counters = {rank: witness for witness in witnesses if witness.name == OPTIMIZER for rank in witness.ranks}
    behind = [rank for rank in record.ranks if rank in counters and set(record.fits) & set(counters[rank].fits)]
    sure = tuple(rank for rank in behind if base not in counters[rank].fits)
    ranks = sure or tuple(rank for rank in record.ranks if rank not in counters)
    return Apart(ranks, record.fits[0], record.rests_on, bool(sure)) if ranks else None
