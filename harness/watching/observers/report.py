"""Takes another tool's diagnosis into a run's artifacts, so that judging opens no file of the job's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir

_MOST_BYTES = 1 << 20


def of_run(plan: Plan, folder: RunDir) -> dict[str, Any] | None:
    """None where no assertion names a report."""
    paths = [str(one.params["report"]) for one in plan.asserts if one.params.get("report")]
    return read(Path(paths[0].replace("{run}", str(folder.job)))) if paths else None


def read(path: Path) -> dict[str, Any]:
    """`culprits`, or an `error`."""
    try:
        with open(path, "rb") as file:
            raw = json.loads(file.read(_MOST_BYTES))
    except OSError as error:
        return {"error": f"it can't be read: {error.strerror}"}
    except (ValueError, RecursionError):
        return {"error": "it is not JSON (or longer than 1 MiB)"}
    named = raw.get("culprits") if isinstance(raw, dict) else None
    if not isinstance(named, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in named):
        return {"error": "it has no `culprits`, a list of ranks"}
    return {"culprits": named}
