"""Deltas, or incremental checkpoints, hold only what has changed since another checkpoint. Such a checkpoint is whole
only if all those on which it builds are whole, down to one that holds everything.

There is no common format of deltas. So a link is read from an entry that names another checkpoint, such as `base:
step-10`. That a checkpoint is a delta is read from the name of a file, or from an entry such as `kind: delta`. A
checkpoint that only names its `parent` or the `previous` one may hold everything itself: it is a delta only if
something else says so."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .. import formats
from ..files import Files
from ..formats import format_table
from ..formats.format import NUMBERED, UNFINISHED, number_in
from ..layout import Checkpoint, Problem, Trouble

_WHICH = r"(_?(checkpoint|ckpt|path|file|folder|dir|name|step|iteration))?"
_BASE = re.compile(rf"(base|delta_(of|from|base)|based_on|builds_on|depends_on|relative_to){_WHICH}", re.I)
_EARLIER = re.compile(rf"(parent|prev|previous|predecessor){_WHICH}", re.I)
_EACH = re.compile(r"(^|[.:/])(chain|bases|parents|based_on|builds_on|depends_on)\.\d+$", re.I)  # an entry of a list
_DELTA = re.compile(r"(?<![a-z])(deltas?|incr|incremental|differential|diffs?(?=[-_.]?\d|['\"]?$))(?![a-z])", re.I)
_SAYS_WHAT = re.compile(r"(kind|type|mode|format|(is_)?(delta|incremental|full))", re.I)
_MOST = 1000  # links


@dataclass(frozen=True)
class Link:
    """A checkpoint that this one names. `path` None: it does not exist."""

    name: str
    path: str | None


def chain(files: Files, layout: Checkpoint) -> Iterator[tuple[str, Checkpoint | Problem]]:
    """All checkpoints on which this one builds, the nearest first: the name of each, with the checkpoint or with the
    problem why it is not there. Empty for a checkpoint that holds everything. Raises OSError if a folder can't be
    listed."""
    own = _plain(layout.path)
    done, waiting = {own}, [layout]
    while waiting:
        one = waiting.pop(0)
        links = _links(files, one)
        if not links and _is_delta(one):
            yield "", _problem(layout, one, Trouble.LIMIT, "it is a delta, and names no checkpoint on which it builds")
        for link in links:
            if link.path is None:
                yield link.name, _problem(layout, one, Trouble.TORN, f"it builds upon {link.name}, which is missing")
            elif link.path not in done:
                done.add(link.path)
                found = formats.read(files, link.path)
                waiting.append(found)
                yield posixpath.basename(link.path), found
            elif link.path == own:
                text = f"it builds upon {link.name}, which builds upon it"
                yield link.name, _problem(layout, one, Trouble.UNREADABLE, text)
            if len(done) > _MOST:
                yield "", _problem(layout, one, Trouble.LIMIT, f"the chain of links is longer than {_MOST}")
                return


def _problem(layout: Checkpoint, one: Checkpoint, kind: Trouble, text: str) -> Problem:
    name = posixpath.basename(one.path)
    return Problem(kind, f"{name}: {text}" if one is layout else f"it builds upon {name}: {text}", one.path)


def _links(files: Files, found: Checkpoint) -> list[Link]:
    """The checkpoints that the entries of this one name as those on which it builds, each once."""
    is_delta = _is_delta(found)
    links: dict[str, Link] = {}
    for name, text in found.values.items():
        key = _key(name)
        if _BASE.fullmatch(key) or _EACH.search(name) or (is_delta and _EARLIER.fullmatch(key)):
            link = _resolved(files, found.path, text.strip("'\""), is_delta)
            if link and link.path != _plain(found.path):
                links[link.path or link.name] = link
    return list(links.values())


def _is_delta(found: Checkpoint) -> bool:
    """Whether the checkpoint holds changes only, by its name, the name of one of its files, or an entry about its
    kind."""
    names = [found.path, *(file.path for file in found.files if file.role == "data")]
    return any(_DELTA.search(posixpath.basename(name)) for name in names) or any(
        (text == "True" and _DELTA.search(key.lower().removeprefix("is_")))
        or (text == "False" and key.lower().endswith("full"))
        or (text[:1] in "'\"" and _DELTA.search(text))
        for key, text in ((_key(name), text) for name, text in found.values.items())
        if _SAYS_WHAT.fullmatch(key)
    )


def _key(name: str) -> str:
    """The last part of an entry's name; there may be a million entries."""
    return name[max(name.rfind(mark) for mark in ".:/") + 1 :]


def _plain(path: str) -> str:
    return path if "://" in path else posixpath.normpath(path)


def _resolved(files: Files, path: str, text: str, is_delta: bool) -> Link | None:
    """The checkpoint that a text names. None if the text seems to name no checkpoint, or only the checkpoint in another
    folder from which a training began."""
    folder, name = posixpath.dirname(path), posixpath.basename(text.rstrip("/"))
    elsewhere = posixpath.basename(posixpath.dirname(text.rstrip("/"))) not in ("", ".", posixpath.basename(folder))
    if not name or not text.isprintable() or (elsewhere and not is_delta) or files.exists(f"{path}/{name}"):
        return None
    there = [text] if posixpath.isabs(text) or "://" in text else [f"{folder}/{text}"]
    for one in (*there, f"{folder}/{name}"):
        if files.exists(one) and formats.kind(files, one):
            return Link(name, _plain(one))
    own = posixpath.basename(path)
    beside = [other for other in files.names(folder) if other != own] if files.is_dir(folder) else []
    for other in beside:
        number = number_in(re.sub(r"\.\w+$", "", other)) if name.isdecimal() else None
        same = number == int(name) if number is not None else other.startswith(f"{name}.")
        if same and not UNFINISHED.search(other) and formats.kind(files, f"{folder}/{other}"):
            return Link(name, _plain(f"{folder}/{other}"))
    if own.startswith(f"{name}."):
        return None
    if name.isdecimal():
        return Link(f"step {name}", None) if is_delta else None
    return Link(name, None) if NUMBERED.search(name) or format_table.of_name(name) else None
