"""collective.drop: the rank leaves one collective out and goes on as if it had been done: the ranks no longer match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Drop(Fault):
    """What comes after depends on the backend: the next collective of the rank may meet this one of the others (wrong
    values, silently, where the sizes fit), fail, or never end."""

    name: ClassVar[str] = "collective.drop"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    phase: ClassVar[str | None] = "collective"

    def changes(self, site: Any) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a collective that was left out can't be made up for: the others are past it")

    def apply(self, site: Any) -> None:
        call = site.call
        call.instead = lambda through: call.left_out()

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.waits import out_of_step

        return out_of_step(record, fault)
