"""nanotron's folders, whose names are the step alone (`10/`), beside `latest.txt`.

A sharded weight has a safetensors file for each rank of tensor parallelism, `..._pp-rank-0-of-1_tp-rank-0-of-2`; a
weight belongs to one rank of pipeline parallelism. The optimizer and the generators have a file for each rank, such as
`optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt`. `checkpoint_metadata.json` is written last. Source: nanotron's
src/nanotron/serialize/."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..files import Files
from ..layout import Checkpoint
from .folders import note_missing
from .format import Format

_LAST = "checkpoint_metadata.json"
_AXIS = re.compile(r"(?<![a-z])(?P<axis>pp|tp|dp|exp)(?P<word>-rank)?-(?P<number>\d+)-of-(?P<count>\d+)")
_PARTS = frozenset({"optimizer", "random", "lr_scheduler", "model_config.json"})
_MOST = 100_000  # ranks


class Nanotron(Format):
    """nanotron's folders `N/`."""

    name = "nanotron"
    tracker = "latest.txt"
    needed_files: ClassVar[Mapping[str, str]] = {
        "the model": r"^model/",
        "the optimizer's state": r"^optimizer/.*\.pt$",
        "the learning rate schedule": r"^lr_scheduler/",
        "the state of the random number generators": r"^random/",
    }

    def tracked(self, text: str) -> str | None:
        return text if text.isdecimal() else None

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        return _LAST in names or ("model" in names and len(_PARTS.intersection(names)) > 1)

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        if self.is_folder(files, folder, names):
            note_missing(into, prefix, [_LAST], set(names))
        sets: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if _AXIS.search(name):
                sets[_AXIS.sub(_without_number, name)].append(name)
        for found in sets.values():
            note_missing(into, prefix, _wanted(found), set(names))


def _without_number(match: re.Match[str]) -> str:
    return f"{match['axis']}{match['word'] or ''}-#-of-{match['count']}"


def _wanted(found: Sequence[str]) -> list[str]:
    """The names of all files of a set, of which `found` are there. All parts of one weight are of the same rank of
    pipeline parallelism."""
    axes = list(_AXIS.finditer(found[0]))
    ranges = []
    for place, axis in enumerate(axes):
        is_owner = axis["axis"] == "pp" and axis["word"]
        there = (int(list(_AXIS.finditer(name))[place]["number"]) for name in found)
        ranges.append(sorted(set(there)) if is_owner else range(min(int(axis["count"]), _MOST)))
    names = []
    for numbers in itertools.islice(itertools.product(*ranges), _MOST):
        left = iter(numbers)
        names.append(_AXIS.sub(lambda match: _without_number(match).replace("#", str(next(left))), found[0]))  # noqa: B023
    return names
