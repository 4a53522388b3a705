"""Reads the names of checkpoints and of their files: the step, the name that a file has when it is complete, and which
of several files holds the model. A name is only a hint: what was recorded of a file counts more."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

# step-20, step_20, checkpoint-20, iter_0000020, global_step20, epoch=0-step=10.ckpt, ep0-ba10
_STEP_IN_NAME = re.compile(
    r"(?:step|iter(?:ation)?|checkpoint|ckpt|(?<![a-z\d])ba)s?[-_=]?(\d+)(?!.*(?:step|iter)[a-z]*[-_=]?\d)", re.I
)
# A name that a checkpoint has until it is complete: .step-20, tmp-step-20, .~step-20, step-20.tmp, step-20.pt.tmp.123
# `part` and `partial` may also belong to the name itself, as in partial_0.pt or model_part_1.pt, which are files of
# ranks.
_WORDS, _PART = "(?:tmp|temp|incomplete|inprogress)", "part(?:ial)?"
_UNFINISHED = re.compile(
    rf"^[._~-]*(?:{_WORDS}[._-]+(?=\w)|{_PART}[._-]+(?=step|iter|epoch|checkpoint|ckpt|global))|^[.~]+(?=\w)"
    rf"|[._-]{_PART}(?:\.\w+)?$|[._-]{_WORDS}\w*(?:[.-]\w+)?$|~$",
    re.I,
)
_IS_PART = re.compile(rf"(?:^|[._-]){_PART}(?:[._-]|\d|$)", re.I)
_SUFFIX = re.compile(r"(?:\.(?:pt|pth|ckpt|bin|pkl|tar|safetensors))+$")


@lru_cache(4096)
def number_in_name(path: str) -> int | None:
    """The step in a name. It is taken from the last part of the path that contains a step."""
    for part in reversed(path.split("/")):
        found = _STEP_IN_NAME.search(part)
        if found:
            return int(found[1])
    return None


def checkpoint_of(path: str) -> str:
    """The checkpoint that contains a file: the path up to the last part that has a step in its name. If no part has
    one, the file itself."""
    parts = final_path(path).split("/")
    ends = [place for place, part in enumerate(parts, 1) if number_in_name(part) is not None]
    return "/".join(parts[: ends[-1]] if ends else parts)


def final_path(path: str) -> str:
    """The path that a checkpoint has when it is complete. Folders above the first name with a step stay as they are:
    they hold all checkpoints."""
    parts = path.split("/")
    first = next((place for place, part in enumerate(parts) if _STEP_IN_NAME.search(part)), len(parts) - 1)
    return "/".join([*parts[:first], *(_UNFINISHED.sub("", part) or part for part in parts[first:])])


def may_be_whole(path: str) -> bool:
    """Whether a checkpoint with this name may be whole. False if the name marks an unfinished checkpoint, or a part of
    a checkpoint."""
    return final_path(path) == path and not _IS_PART.search(posixpath.basename(path))


def is_related(path: str, other: str) -> bool:
    return path == other or path.startswith(other + "/") or other.startswith(path + "/")


def is_renamed(path: str, other: str) -> bool:
    return _SUFFIX.sub("", path) == _SUFFIX.sub("", other)


def is_moved(path: str, other: str) -> bool:
    """Whether both paths are files of checkpoints with the same name, and the name has a step."""
    ours, theirs = checkpoint_of(path), checkpoint_of(other)
    same = is_renamed(posixpath.basename(ours), posixpath.basename(theirs))
    return same and number_in_name(posixpath.basename(ours)) is not None


# Files that lie beside a model: states of generators, optimizers, schedules and loaders, settings, and trackers.
_BESIDE = re.compile(
    r"rng|random|seed|optim|(^|[._-])opt([._-]|$)|sched|scaler|sampler|data_?loader|train(er|ing)?_?(state|args|info)"
    r"|progress|metric|config|args|meta|latest|last_checkpoint|tokenizer|callback|stats",
    re.I,
)
_COPY = re.compile(r"best|(^|[._-])ema([._-]|\d|$)", re.I)


def name_of_all(paths: Sequence[str], others: Iterable[str] | None = None) -> str:
    """The name of a checkpoint with these files: its folder, if this folder holds several of the files and nothing
    else. `others`: the paths of other checkpoints; None: not known."""
    main = main_of(paths)
    folder = posixpath.dirname(main)
    alone = others is not None and len(set(paths)) > 1 and {*map(posixpath.dirname, paths)} == {folder}
    if number_in_name(main) is None and alone and folder not in {*map(posixpath.dirname, others or ())}:
        return posixpath.basename(folder)
    return posixpath.basename(checkpoint_of(main))


def main_of(paths: Sequence[str]) -> str:
    """The path that, by its name, most likely holds the model. If none does: the first."""
    return min(paths, key=lambda path: (*main_first(path), number_in_name(path) is None))


def is_copy(path: str) -> bool:
    """Whether the name of a file marks a copy of a model that is in another file."""
    return bool(_COPY.search(posixpath.basename(path)))


def main_first(path: str) -> tuple[bool, bool]:
    """A sort key: first the file of a model, then copies of it, then files that lie beside a model."""
    return bool(_BESIDE.search(posixpath.basename(path))), is_copy(path)
