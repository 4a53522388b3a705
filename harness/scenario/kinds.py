"""What a YAML file is: a scenario, a game day, a gate, or none of our files. A folder may hold all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchaos.harness.contracts import UsageError
from torchaos.harness.scenario.yaml_source import read

KINDS = ("scenario", "gameday", "gate")  # each is the key of its name
IN_WORDS = {"scenario": "scenario", "gameday": "game day", "gate": "gate"}
_PARTS = {  # keys that a file without its name has
    "scenario": {"job", "assert", "faults"}, "gameday": {"job", "faults", "duration", "arrivals", "preset", "score"},
    "gate": {"scenarios", "explored", "max_age", "environments", "waivers"},
}  # fmt: skip
_KEY = re.compile(rb"""(?:^|\r)(?:\xef\xbb\xbf)?["']?(scenario|gameday|gate)["']?\s*:""", re.MULTILINE)


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
    return kind_in(data)


def kind_in(data: Mapping[str, Any]) -> str:
    """The kind of a file with these keys; empty if it is none of ours."""
    most = max(KINDS, key=lambda kind: (kind in data, len(_PARTS[kind] & data.keys())))
    return most if most in data or len(_PARTS[most] & data.keys()) > 1 else ""


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
            named = " or ".join(IN_WORDS[kind] for kind in kinds)
            raise UsageError(f"{path}: it holds no {named} (*.yaml); give a file, or another folder")
        found += own
    return found
