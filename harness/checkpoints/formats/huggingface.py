"""The folders `checkpoint-N/` of Transformers' Trainer, which Trainer._save_checkpoint writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..files import Files
from ..layout import Checkpoint
from .folders import check_ranks, note_missing
from .format import Format

_FOLDER, _STATE = re.compile(r"(^|/)checkpoint-\d+/?$"), "trainer_state.json"
_EARLIER = frozenset({"training_args.bin", "scheduler.pt"})  # the Trainer writes them before trainer_state.json
_RANKED = re.compile(r"^(?P<head>rng_state_)(?P<rank>\d+)(?P<tail>\.pth)$")


class HuggingFace(Format):
    """The folders of Transformers' Trainer."""

    name = "huggingface"
    asked = 40
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"^(model|pytorch_model|adapter_model).*\.(safetensors|bin)$|^(global_step|pytorch_model_fsdp)",
        "the optimizer's state": r"^optimizer.*\.(pt|bin)$|^optimizer_\d+/|global_step",
        "the learning rate schedule": r"^scheduler\.pt$",
        "the state of the random number generators": r"^rng_state(_\d+)?\.pth$",
        "how far training was": r"^trainer_state\.json$",
    }

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        unfinished = _FOLDER.search(folder) and not _EARLIER.isdisjoint(names)
        return _STATE in names or bool(unfinished)

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        if self.is_folder(files, folder, names):
            note_missing(into, prefix, [_STATE], set(names))
        check_ranks(_RANKED, names, into, prefix)
