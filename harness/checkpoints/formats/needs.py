"""The parts of a checkpoint that a resume needs, and which of them are missing. Formats declare the parts. For a format
without a declaration, they are guessed from the names of the entries. A part that is missing according to a guess is
reported, but is no damage."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..layout import Checkpoint
from .format import Format

_GUESSED = {
    "the optimizer's state": re.compile(r"optim|exp_avg|momentum|(^|[.:])opt\b", re.I),
    "the learning rate schedule": re.compile(r"sched|last_epoch|(^|[.:_])lr", re.I),
    "the state of the random number generators": re.compile(r"rng|random|seed|mt19937", re.I),
    "how far training was": re.compile(r"step|iter|epoch|consumed", re.I),
}


def missing(form: Format, found: Checkpoint) -> list[str]:
    """The missing parts in words; empty if nothing is missing."""
    if form.model_only:
        return ["the optimizer's state: this format holds tensors of a model only"]
    if form.needed_files:
        return _lacking(form.needed_files, [file.path[len(found.path) + 1 :] for file in found.files])
    names = [*found.tensors, *found.values]
    if form.needed_entries:
        return _lacking(form.needed_entries, names)
    return [part for part, pattern in _GUESSED.items() if not any(map(pattern.search, names))]


def _lacking(wanted: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [part for part, pattern in wanted.items() if not any(re.search(pattern, name) for name in names)]
