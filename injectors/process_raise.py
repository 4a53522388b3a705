"""process.raise: an exception in the training loop's own thread, as a bug or a bad batch raises."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Site, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Raise(Fault):
    """RuntimeError with `text`, raised where the Moment is. A job may catch it and go on: then the fault was not
    felt. A job may catch it and save before it ends: then another rank may die first, and torchelastic ends this
    one."""

    text: str = "injected by torchaos"

    name: ClassVar[str] = "process.raise"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})

    def changes(self, site: Site) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("an exception that was raised can't be taken back")

    def apply(self, site: Site) -> None:
        raise RuntimeError(self.text)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import died

        return died(record, fault, *range(1, 256), -signal.SIGABRT, -signal.SIGTERM)
