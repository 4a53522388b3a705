"""cuda.error: the CUDA context of the rank is broken. Every call that touches a device raises the same error, until
exit."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from torchaos.harness.agent.cuda import Kind, error, poison
from torchaos.harness.agent.fault import Fault

if TYPE_CHECKING:
    from torchaos.harness.contracts import Evidence, Irreversible, Where
    from torchaos.harness.record.record import Record


@dataclass(frozen=True)
class Error(Fault):
    """PyTorch's own error, with its text and code, in the call that the Moment is at, and in each one after. Where
    there is no GPU, the CPU stands for the device. A job that catches it and goes on meets it again. `kind`: which of
    CUDA's errors it is."""

    kind: Kind = "ecc"

    name: ClassVar[str] = "cuda.error"
    where: ClassVar[tuple[Where, ...]] = ("rank",)
    needs: ClassVar[frozenset[str]] = frozenset({"agent"})
    phase: ClassVar[str | None] = "backward"

    def changes(self, site: Any) -> Irreversible:
        from torchaos.harness.contracts import Irreversible

        return Irreversible("a broken context stays broken until the process ends")

    def apply(self, site: Any) -> None:
        torch: Any = import_module("torch")
        poison(torch, self.kind)
        raise error(torch, self.kind)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        from torchaos.harness.judging.proof.evidence import died

        return died(record, fault, *range(1, 256), -6)
