"""storage.fill: the file system that job.checkpoints.size makes is filled until `left` bytes are free."""

from __future__ import annotations

from dataclasses import dataclass

from torchaos.plugin import Size
from torchaos.plugin.families.storage import FillFault


@dataclass(frozen=True)
class Fill(FillFault):
    """A file of torchaos takes all space except `left` bytes, so every rank and every open file is hit. Space that the
    job frees can be used again."""

    left: Size = 0

    name = "storage.fill"
