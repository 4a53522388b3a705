"""Reads finished runs from disk: run directories, and files of `--json`. They may have been moved, cut off or
damaged."""

from __future__ import annotations

import json
from pathlib import Path

from torchaos.harness.contracts import UsageError
from torchaos.harness.record.result import Result
from torchaos.harness.record.rundir import RunDir

_MOST_BYTES = 32 << 20  # of a file


def result_in(folder: RunDir) -> Result:
    """The result of a run. Raises OSError if there is none, UsageError if it can't be read."""
    return Result.from_json(_json(folder.result))


def explored_in(home: Path) -> Result:
    """The result of an exploration. Raises OSError if there is none, UsageError if it can't be read."""
    raw = _json(home / "explored.json")
    return Result.from_json(raw.get("result") if isinstance(raw, dict) else None)


def results_in(path: Path) -> list[Result]:
    """The results in a file of `torchaos run --json`. Raises OSError if there is none, UsageError if it can't be
    read."""
    raw = _json(path)
    if not isinstance(raw, dict) or not isinstance(raw.get("results"), list):
        raise UsageError("there are no results in it")
    return [Result.from_json(result) for result in raw["results"]]


def commit_in(folder: RunDir) -> str:
    """The commit of the job's working directory, with `-dirty` if it had uncommitted changes; empty if not known."""
    try:
        found = _json(folder.artifacts / "environment.json")
    except (OSError, UsageError):
        return ""
    return str(found.get("commit") or "") if isinstance(found, dict) else ""


def _json(path: Path) -> object:
    with open(path, "rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise UsageError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not JSON: {error}") from error
