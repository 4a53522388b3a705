"""The checkpoints of a run, each with all its files: those that were saved after one step. A checkpoint is named by the
file that holds the model; files beside it, such as the states of generators, follow it. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence

from torchaos.harness.record.history.saves_and_loads import Save, checkpoint_of, number_in_name

# Files that lie beside a model: states of generators, optimizers, schedules and loaders, settings, and trackers.
_BESIDE = re.compile(
    r"rng|random|seed|optim|(^|[._-])opt([._-]|$)|sched|scaler|sampler|data_?loader|train(er|ing)?_?(state|args|info)"
    r"|progress|metric|config|args|meta|latest|last_checkpoint|tokenizer|callback|stats",
    re.I,
)
_COPY = re.compile(r"best|(^|[._-])ema([._-]|\d|$)", re.I)  # often of a model that is in another file


def by_step(saves: Iterable[Save]) -> list[list[Save]]:
    """The saves of each checkpoint, in the order in which they began."""
    found: dict[tuple[int, int], list[Save]] = {}
    for save in sorted(saves, key=lambda save: save.begun_s):
        found.setdefault((save.attempt, save.local_step), []).append(save)
    return list(found.values())


def name_of_all(paths: Sequence[str]) -> str:
    """The name of a checkpoint with these files."""
    return posixpath.basename(checkpoint_of(main_of(paths)))


def main_of(paths: Sequence[str]) -> str:
    """The path, of these, that most likely holds the model, by its name. If none does: the first."""
    return min(paths, key=_rank)


def is_beside(path: str) -> bool:
    """Whether a file lies beside a model, by its name."""
    return bool(_BESIDE.search(posixpath.basename(path)))


def _rank(path: str) -> tuple[bool, bool, bool]:
    name = posixpath.basename(path)
    return is_beside(path), bool(_COPY.search(name)), number_in_name(path) is None
