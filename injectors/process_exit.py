"""process.exit: the rank leaves in the middle of its work, with a code of choice."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Site, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Exit(Fault):
    """_exit(2) with `code`: no clean-up runs. 0 is the nasty one: a supervisor takes it for success."""

    code: int = 1

    name: ClassVar[str] = "process.exit"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    lethal: ClassVar[bool] = True

    def changes(self, site: Site) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a dead process can't be brought back; restarting it is the job's affair")

    def apply(self, site: Site) -> None:
        os._exit(self.code)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import died

        return died(record, fault, self.code)
