"""DeepSpeed's folders `global_stepN/`: the files that a ZeRO checkpoint must have, computed from the sizes in its own
files.

The names, with deepspeed 0.19.8: `mp_rank_00_model_states.pt` (ZeRO-3: `zero_pp_rank_0_mp_rank_00_model_states.pt`),
and `[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt` for each rank of data parallelism and each rank of model
parallelism."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..files import Files
from ..layout import Checkpoint, Problem, Trouble
from .format import Format

_OPTIMIZER = re.compile(r"^(?P<kind>|bf16_|fp16_)zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt$")
_MODEL = re.compile(r"(?:^|_)mp_rank_(?P<model>\d+)_model_states\.pt$")
_MOST = 100_000  # ranks


class DeepSpeed(Format):
    """DeepSpeed's folders `global_stepN/`."""

    name = "deepspeed"
    tracker = "latest"
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"_model_states\.pt$",
        "the optimizer's state": r"_optim_states\.pt$",
    }

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return any(_OPTIMIZER.match(name) or name.endswith("_model_states.pt") for name in names)

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        if self.is_folder(files, folder, names):
            _check(names, into, prefix)


def _check(names: Sequence[str], into: Checkpoint, prefix: str) -> None:
    """Adds a problem for each missing file."""
    parts = [match for match in map(_OPTIMIZER.match, names) if match]
    have = {(int(part["model"]), int(part["data"])) for part in parts}
    models = {int(match["model"]) for match in map(_MODEL.search, names) if match}
    if not have and not _number(into, prefix, "ds_config.zero_optimization.stage"):
        return
    size = max([_number(into, prefix, "dp_world_size"), *(data + 1 for _, data in have)])
    kind = parts[0]["kind"] if parts else ""
    missing = [f"mp_rank_{rank:02}_model_states.pt" for rank in sorted({rank for rank, _ in have} - models)]
    for model in sorted(models | {rank for rank, _ in have}):
        lost = [data for data in range(min(size, _MOST)) if (model, data) not in have]
        missing += [f"{kind}zero_pp_rank_{data}_mp_rank_{model:02}_optim_states.pt" for data in lost]
    into.problems += [Problem(Trouble.TORN, f"{prefix}{name}: missing") for name in missing]


def _number(into: Checkpoint, prefix: str, name: str) -> int:
    """The highest value of `name` in the folder's files. 0 if there is none."""
    found = [value for key, value in into.values.items() if key.startswith(prefix) and key.endswith(f".pt:{name}")]
    return max((int(value) for value in found if value.isdigit()), default=0)
