"""process.raise: an exception in the training loop's own thread, as a bug or a bad batch raises."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from torchaos.plugin import Evidence, Fault, Irreversible, NodeSite, RankSite, Record, died


@dataclass(frozen=True)
class Raise(Fault):
    """RuntimeError with `text`, raised where the Moment is. A job may catch it and go on: then the fault was not
    felt. A job may catch it and save before it ends: then another rank may die first, and torchelastic ends this
    one."""

    text: str = "injected by torchaos"

    name = "process.raise"
    where = ("rank",)
    needs = frozenset({"agent"})

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("an exception that was raised can't be taken back")

    def apply(self, site: RankSite) -> None:
        raise RuntimeError(self.text)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return died(record, fault, *range(1, 256), -signal.SIGABRT, -signal.SIGTERM)
