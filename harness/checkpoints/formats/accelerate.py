"""Accelerate's folders `checkpoint_N/`, which its save_accelerator_state writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..files import Files
from ..layout import Checkpoint
from .folders import check_ranks
from .format import Format

_RANKED = re.compile(r"^(?P<head>random_states_)(?P<rank>\d+)(?P<tail>\.pkl)$")


class Accelerate(Format):
    """The folders of Accelerate's save_state."""

    name = "accelerate"
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"^(model|pytorch_model).*\.(safetensors|bin)$|^pytorch_model_\w+/",
        "the optimizer's state": r"^optimizer(_\d+)?\.bin$|^optimizer_\d+/",
        "the state of the random number generators": r"^random_states_\d+\.pkl$",
    }

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return any(name.startswith("random_states_") and name.endswith(".pkl") for name in names)

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        check_ranks(_RANKED, names, into, prefix)
