"""process.raise: an exception in the thread of the training loop, as from a bug or a bad batch."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from torchaos.plugin import Irreversible, NodeSite, RankSite
from torchaos.plugin.families.ranks import ExceptionFault


@dataclass(frozen=True)
class Raise(ExceptionFault):
    """Raises RuntimeError with `text` at the moment of the trigger. If the job catches it and continues, the fault was
    not felt, unless it loads a checkpoint again, its ranks begin the step anew, or its ranks stand still until an error
    is in the log. If the job catches it and ends, it was felt, unless the rank had no more steps to make. (If the job
    saves before it ends, another rank may die first, and torchelastic then ends this rank.)"""

    text: str = "injected by torchaos"

    name = "process.raise"
    codes = (*ExceptionFault.codes, -signal.SIGTERM)

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("an exception that was raised can't be taken back")

    def apply(self, site: RankSite) -> None:
        raise RuntimeError(self.text)
