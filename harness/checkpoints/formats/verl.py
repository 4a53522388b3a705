"""verl's folders `global_step_10/`, with a folder for each model that is trained (`actor/`, `critic/`), beside
`latest_checkpointed_iteration.txt`.

With FSDP, each rank writes `model_world_size_2_rank_0.pt`, and the same for `optim` and `extra_state`. With Megatron,
`actor/dist_ckpt/` is a folder of torch.distributed.checkpoint. Source: verl/utils/checkpoint/
fsdp_checkpoint_manager.py and, for `data.pt` and the tracker, verl/trainer/ppo/ray_trainer.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..files import Files
from ..layout import Checkpoint
from .folders import note_missing
from .format import Format

_FOLDER = re.compile(r"(^|/)global_step_\d+/?$")
_OF_RANK = re.compile(r"^(?P<head>\w+_world_size_(?P<count>\d+)_rank_)\d+(?P<tail>\.pt)$")
_OWN = frozenset({"actor", "critic", "data.pt"})
_MOST = 100_000  # ranks


class Verl(Format):
    """verl's folders `global_step_N/`."""

    name = "verl"
    tracker = "latest_checkpointed_iteration.txt"
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"(^|/)model_world_size_|\.distcp$|\.safetensors$",
        "the optimizer's state": r"(^|/)optim_world_size_|\.distcp$",
        "the schedule and the random number generators": r"(^|/)extra_state_world_size_|\.distcp$",
        "how far the data was read": r"^data\.pt$",
    }

    def tracked(self, text: str) -> str | None:
        return f"global_step_{text}" if text.isdecimal() else None

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        own = _FOLDER.search(folder) and not _OWN.isdisjoint(names)
        return bool(own) or any(map(_OF_RANK.match, names))

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        for head, count, tail in sorted({match.groups() for match in map(_OF_RANK.match, names) if match}):
            wanted = [f"{head}{rank}{tail}" for rank in range(min(int(count), _MOST))]
            note_missing(into, prefix, wanted, set(names))
