"""cuda.error: the CUDA context of the rank is broken. Every call that touches a device raises the same error, until
exit."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torchaos.injectors.cuda_errors import Kind, error, poison
from torchaos.plugin import Evidence, Fault, Irreversible, NodeSite, RankSite, Record
from torchaos.plugin.evidence import broke_off, died


@dataclass(frozen=True)
class Error(Fault):
    """Raises PyTorch's own error, with its text and code, in the call at the moment of the trigger. Every later call
    raises it again, even if the job catches it. Without a GPU, operations on the CPU raise it. `kind`: the CUDA
    error."""

    kind: Kind = "ecc"

    name = "cuda.error"
    where = ("rank",)
    imitates = "PyTorch's error of a broken CUDA context"
    needs = frozenset({"agent"})
    phase = "backward"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("a broken context stays broken until the process ends")

    def apply(self, site: RankSite) -> None:
        torch: Any = import_module("torch")
        poison(torch, self.kind)
        raise error(torch, self.kind)

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return died(record, fault, *range(1, 256), -6) or broke_off(record, fault)
