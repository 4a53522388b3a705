"""Copies the diagnosis of another tool into the run's artifacts, so that later no file of the job has to be read for
the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir

_MOST_BYTES = 1 << 20


def of_run(plan: Plan, folder: RunDir) -> dict[str, Any] | None:
    """The report of a run, as `read` returns it; None if no assertion names a report."""
    paths = [str(assertion.params["report"]) for assertion in plan.asserts if assertion.params.get("report")]
    return read(Path(paths[0].replace("{run}", str(folder.job)))) if paths else None


def read(path: Path) -> dict[str, Any]:
    """{"culprits": list of ranks}, or {"error": why the report can't be used}."""
    try:
        with open(path, "rb") as file:
            raw = json.loads(file.read(_MOST_BYTES))
    except OSError as error:
        return {"error": f"it can't be read: {error.strerror}"}
    except (ValueError, RecursionError):
        return {"error": "it is not JSON (or longer than 1 MiB)"}
    named = raw.get("culprits") if isinstance(raw, dict) else None
    if not isinstance(named, list) or not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in named):
        return {"error": "it has no `culprits`, a list of ranks"}
    return {"culprits": named}
