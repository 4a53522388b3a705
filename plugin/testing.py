"""For the tests of plug-ins: the records of a run that was made once, as `judge` and `felt` get them."""

from __future__ import annotations

from pathlib import Path

from torchaos.harness.analysis.verdict import records_of
from torchaos.harness.record.record import Record
from torchaos.harness.record.rundir import RunDir

__all__ = ["records_in"]


def records_in(folder: Path | str) -> tuple[Record, list[Record]]:
    """The record of the run in this run directory, and the records of its twins. Nothing in it is changed. Raises
    ChaosError if a record is incomplete."""
    return records_of(RunDir(Path(folder)))
