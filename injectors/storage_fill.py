"""storage.fill: the file system that job.checkpoints.size makes is filled until `left` bytes are free."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import FillFault, Size


@dataclass(frozen=True)
class Fill(FillFault):
    """A file of ours takes all room but `left` bytes, for every rank, whatever it has open; what the job removes, it
    can use again."""

    left: Size = 0

    name = "storage.fill"
