"""Lightning's `.ckpt`: a torch.save file with the keys of lightning's dump_checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..layout import Checkpoint
from .format import Format
from .torch_save import TorchSave


class Lightning(Format):
    """Lightning's `.ckpt` files."""

    name = "lightning"
    needed_entries: ClassVar[Mapping[str, str]] = {
        "the model": r"^state_dict\.",
        "the optimizer's state": r"^optimizer_states\.",
        "how far training was": r"^global_step$",
        "the state of the loops": r"^loops\.",
    }

    def refines(self, found: Checkpoint) -> bool:
        return found.format == TorchSave.name and "pytorch-lightning_version" in found.values
