"""Results as JSON, for dashboards and for trends.

`{"schema": 1, "results": [...]}`; each result is what lies in a run directory as result.json:

- `schema`: counted up when a reader of the old shape would misread the new one. Keys may be added without that.
- `scenario`, `description`, `seed`, `reproduce` (command line), `run_dir`, `started` (ISO 8601, UTC), `duration_s`
- `verdict`: passed, failed, inconclusive or error; `reason`: one line; `exit_code`: that of this scenario alone;
  `decided_by`: the case that decided, empty if none did
- `faults`: `id`, `inject`, `target`, `planned`, `applied` (null: never landed), `evidence` (null: not felt),
  `rollback`, `verdict`, `reason`
- `recoveries`: `fault`; `parts`: seconds since the fault was applied (null: not seen); `lost_steps` (null: not known)
- `cases`: `name`, `kind` (assertion, faults, rollback), `verdict`, `reason`, `measured` and `bound` by name,
  `seconds` (the names of those figures that are durations)
- `steps`: the highest global step that counts (null: none was seen); `attempts`; `twin`; `versions`; `notes`

Where scenarios were repeated there is `repeats`, one for each: `scenario`, `asked`, `times`, `seeds`, `run_dirs`,
`verdict`, `reason`, `exit_code`; `rate` of the scenario and `cases` of each case: `passed`, `failed`, `inconclusive`,
and the bounds `low` and `high` of the true rate (each with `confidence`; null without SciPy); `figures`: `name`,
`seconds` (whether it is a duration), `count`, `unseen`, `min`, `median`, `p90`, `max`; `of_rate`: whether one
repetition that fails decides nothing.

Not-a-number and infinities are the strings "nan", "inf" and "-inf". `Result.from_json` reads one result back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchaos.harness.machine.disk import write_atomically
from torchaos.harness.record.result import SCHEMA, Result
from torchaos.harness.record.secrecy import mask
from torchaos.harness.release.repeats.judged import Repeats
from torchaos.harness.telling.terminal.repeats import as_json


def write(results: Sequence[Result], path: Path, repeats: Sequence[Repeats] = ()) -> None:
    """Replaces the file in one step; secrets in `reproduce` are masked. Raises OSError if it can't be written."""
    shown = [replace(result, reproduce=mask(result.reproduce)) for result in results]
    found: dict[str, Any] = {"schema": SCHEMA, "results": [result.to_json() for result in shown]}
    if repeats:
        found["repeats"] = [as_json(one) for one in repeats]
    write_atomically(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
