"""What a YAML file is: a scenario, a game day, a gate, or none of our files. A folder may hold all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from torchaos.harness.contracts import UsageError
from torchaos.harness.scenario.yaml_source import read

KINDS = ("scenario", "gameday", "gate")  # each is the key of its name
_PARTS = {"job", "assert", "faults"}
_KEY = re.compile(rb"""^["']?(scenario|gameday|gate)["']?\s*:""", re.MULTILINE)


def kind_of(file: Path) -> str:
    """The kind of the file; empty if it is none of ours. A file with mistakes has a kind, too. Raises UsageError if it
    can't be read."""
    try:
        data = read(file).data
    except UsageError:
        try:
            found = _KEY.search(file.read_bytes())
        except OSError as error:
            raise UsageError(f"{file}: it can't be read: {error.strerror}") from error
        return found[1].decode() if found else ""
    named = next((kind for kind in KINDS if kind in data), "")
    return named or ("scenario" if len(_PARTS & data.keys()) > 1 else "")


def files_in(paths: Sequence[Path], kinds: Collection[str] = KINDS) -> list[Path]:
    """The files, with those of these kinds in place of each folder. Raises UsageError if a folder has none."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(one for one in path.iterdir() if one.suffix in (".yaml", ".yml"))
        own = [one for one in inside if kind_of(one) in kinds]
        if not own:
            raise UsageError(f"{path}: it holds no {' or '.join(kinds)} (*.yaml); give a file, or another folder")
        found += own
    return found
