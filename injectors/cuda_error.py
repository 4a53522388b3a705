"""cuda.error: the CUDA context of the rank is broken. Every call that touches a device raises the same error, until
exit."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torchaos.injectors.cuda_errors import Kind, error, poison
from torchaos.plugin import Irreversible, NodeSite, RankSite
from torchaos.plugin.families.ranks import ExceptionFault


@dataclass(frozen=True)
class Error(ExceptionFault):
    """Raises PyTorch's own error, with its text and code, in the call at the moment of the trigger. Every later call
    raises it again, even if the job catches it. Without a GPU, operations on the CPU raise it. `kind`: the CUDA
    error."""

    kind: Kind = "ecc"

    name = "cuda.error"
    imitates = "PyTorch's error of a broken CUDA context"
    phase = "backward"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("a broken context stays broken until the process ends")

    def apply(self, site: RankSite) -> None:
        torch: Any = import_module("torch")
        poison(torch, self.kind)
        raise error(torch, self.kind)
