"""The sources that a job may use, as far as can be known before it runs, and the environment variables that they name.

A source counts if something that counts already names it: the command, an import, a text such as "model.head" or
"prepare.py". So a note or an experiment beside the script does not make a twin stale. Sources that a job finds in
another way are seen by its agent when they are read (inputs.py). A source with the name of an installed module always
counts, because it would be imported instead."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

_MOST_BYTES = 1 << 20  # of a source; what follows is not looked at
_WORD = re.compile(rb"[A-Za-z_]\w*")
_IMPORT = re.compile(rb"\b(?:from\s+([\w.]+)\s+)?import\b\s*(\([^)]*\)|[^\n#;]*)")
_TEXT = re.compile(rb"""["']([\w./-]+)["']|([\w./-]+\.py)\b""")
_VARIABLE = re.compile(rb"""["']([A-Za-z_]\w*)["']|\$\{?([A-Za-z_]\w*)""")  # "EPOCHS", ${EPOCHS}
_ALWAYS = {"sitecustomize", "usercustomize"}  # Python itself imports them


def used(named: Iterable[Path], words: Iterable[str], there: Iterable[Path], importable: Collection[str]) -> set[Path]:
    """The sources in `there` that count, and the files `named`. `words`: those of the command and of the environment
    that the scenario sets. `importable`: the names of installed modules."""
    by_name = defaultdict[str, list[Path]](list)
    for path in there:
        by_name[path.parent.name if path.stem in ("__init__", "__main__") else path.stem].append(path)
    found, seen = set(named), {*importable, *_ALWAYS, *_words(os.fsencode(" ".join(words)))}
    todo, new = [*found], seen
    while True:
        for name in by_name.keys() & new:
            todo += (path for path in by_name[name] if path not in found)
            found |= {*by_name[name]}
        if not todo:
            return found
        new = _names_in(todo.pop()) - seen
        seen |= new


def variables_in(sources: Iterable[Path]) -> set[str]:
    """The names in the sources that may be those of environment variables."""
    pairs = (pair for path in sources for pair in _VARIABLE.findall(start_of(path)))
    return {os.fsdecode(name) for pair in pairs for name in pair if name}


def start_of(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""


def _names_in(path: Path) -> set[str]:
    """The names of modules that a source may import or start; of a file that is no Python, all its words."""
    text = start_of(path)
    if path.suffix == ".py":
        text = b" ".join(part for pattern in (_IMPORT, _TEXT) for pair in pattern.findall(text) for part in pair)
    return _words(text)


def _words(text: bytes) -> set[str]:
    return {os.fsdecode(word) for word in _WORD.findall(text)}
