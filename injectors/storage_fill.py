"""storage.fill: the file system that job.checkpoints.size makes is filled until `left` bytes are free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import OutsideFault
from torchaos.harness.agent.quantities import Size

if TYPE_CHECKING:
    from torchaos.harness.contracts import Hits


@dataclass(frozen=True)
class Fill(OutsideFault):
    """A file of ours takes all room but `left` bytes, for every rank, whatever it has open; what the job removes, it
    can use again."""

    left: Size = 0

    name: ClassVar[str] = "storage.fill"
    needs: ClassVar[frozenset[str]] = frozenset({"mount"})
    hits: ClassVar[Hits] = "files"
    late: ClassVar[bool] = True
    hooks: ClassVar[tuple[str, ...]] = ("checkpoints",)
    own_disk: ClassVar[bool] = True
    mechanics: ClassVar[str] = "torchaos.harness.storage.ballast"
