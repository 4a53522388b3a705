"""Megatron-LM's folders `iter_0000020/`, beside `latest_checkpointed_iteration.txt`: the files that belong to them.

In the form torch_dist, it is a folder of torch.distributed.checkpoint, with the unsharded data in `common.pt`, and with
`metadata.json`. In the form torch, it has a folder `mp_rank_00[_000]` for each rank of tensor (and pipeline)
parallelism. Each holds `model_optim_rng.pt`, and also `distrib_optim.pt` if the optimizer is distributed. Source:
Megatron-LM's megatron/training/checkpointing.py and, in megatron-core 0.16.1, core/dist_checkpointing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from ..files import Files
from ..layout import Checkpoint, Problem, Trouble
from .dcp import METADATA
from .format import Format

_RANK = re.compile(r"^mp_rank_(?P<tensor>\d{2})(?:_(?P<pipeline>\d{3}))?(?:_\d{3})?$")
_FOLDER = re.compile(r"(^|/)(iter_\d{7}|release)/?$")
_COMMON, _BACKEND = "common.pt", "metadata.json"
_OF_RANK = ("model_optim_rng.pt", "distrib_optim.pt")
_MOST = 100  # ranks: two digits


class Megatron(Format):
    """Megatron-LM's folders `iter_N/`."""

    name = "megatron"
    asked = 10  # before DCP: a folder of torch_dist is one of DCP too
    tracker = "latest_checkpointed_iteration.txt"

    def tracked(self, text: str) -> str | None:
        return f"iter_{int(text):07}" if text.isdecimal() else "release" if text == "release" else None

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        """Whether the folder is of this format. One of the format's own files may be missing, and other formats may
        have files with these names, so the name of the folder decides too."""
        ranks = [name for name in names if _RANK.match(name)]
        if _FOLDER.search(folder):
            return bool(ranks) or not {_COMMON, _BACKEND}.isdisjoint(names)
        inside = [set(files.names(path)) for name in ranks if files.is_dir(path := f"{folder}/{name}")]
        return bool(ranks) and (not any(inside) or any(not each.isdisjoint(_OF_RANK) for each in inside))

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        if self.is_folder(files, folder, names):
            _check(files, folder, names, into, prefix)


def _check(files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
    """Adds a problem for each missing file."""
    ranks = [match for match in map(_RANK.match, names) if match]
    backend = into.values.get(f"{prefix}{_BACKEND}:sharded_backend", "'torch_dist'")
    if not ranks and backend != "'torch_dist'":
        text = f"{prefix}{_BACKEND}: its tensors are in the form {backend}, which is not read"
        into.problems.append(Problem(Trouble.UNKNOWN, text))
        return
    missing = [name for name in (METADATA, _COMMON, _BACKEND) if not ranks and name not in names]
    if ranks:
        inside = {match[0]: files.names(f"{folder}/{match[0]}") for match in ranks}
        every = {name for each in inside.values() for name in each if name in _OF_RANK} or set(_OF_RANK[:1])
        missing = [f"{rank}/{name}" for rank, each in inside.items() for name in sorted(every - set(each))]
        every_rank = _grid(ranks, into, f"{prefix}mp_rank_")
        missing += [name for name in every_rank if not any(rank.startswith(name) for rank in inside)]
    into.problems += [Problem(Trouble.TORN, f"{prefix}{name}: missing") for name in missing]


def _grid(ranks: Sequence[re.Match[str]], into: Checkpoint, head: str) -> list[str]:
    """The names of the folders of all ranks, of which some are there. The sizes are in the arguments of the job, which
    each rank saves."""

    def count(axis: str) -> int:
        sizes = [
            min(int(value), _MOST) for name, value in into.values.items()
            if name.startswith(head) and name.endswith(f":args.{axis}_model_parallel_size") and value.isdecimal()
        ]  # fmt: skip
        return max([*(int(match[axis] or 0) + 1 for match in ranks), *sizes])

    if not any(match["pipeline"] for match in ranks):
        return [f"mp_rank_{tensor:02}" for tensor in range(count("tensor"))]
    grid = itertools.product(range(count("tensor")), range(count("pipeline")))
    return [f"mp_rank_{tensor:02}_{pipeline:03}" for tensor, pipeline in grid]
