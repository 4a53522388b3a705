"""process.raise: an exception in the thread of the training loop, as from a bug or a bad batch."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Irreversible, NodeSite, RankSite, Record
from torchaos.plugin.evidence import broke_off, died


@dataclass(frozen=True)
class Raise(Fault):
    """Raises RuntimeError with `text` at the moment of the trigger. If the job catches it and continues, the fault was
    not felt, unless it loads a checkpoint again, or its ranks stand still until an error is in the log. If the job
    catches it and saves before it ends, another rank may die first, and torchelastic then ends this rank."""

    text: str = "injected by torchaos"

    name = "process.raise"
    where = ("rank",)
    needs = frozenset({"agent"})

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("an exception that was raised can't be taken back")

    def apply(self, site: RankSite) -> None:
        raise RuntimeError(self.text)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return died(record, fault, *range(1, 256), -signal.SIGABRT, -signal.SIGTERM) or broke_off(record, fault)
