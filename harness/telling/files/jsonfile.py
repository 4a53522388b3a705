"""Results as JSON, for dashboards and for trends.

`{"schema": 1, "results": [...]}`; each result has the same form as result.json in a run directory:

- `schema`: increased when older readers would misunderstand the new form. Added keys do not increase it.
- `scenario`, `description`, `seed`, `reproduce` (command line), `run_dir`, `started` (ISO 8601, UTC), `duration_s`
- `verdict`: passed, failed, inconclusive or error; `reason`: one line; `exit_code`: that of this scenario alone;
  `decided_by`: the case that decided, empty if none did
- `faults`: `id`, `inject`, `target`, `planned`, `applied` (null: never landed), `evidence` (null: not felt),
  `rollback`, `verdict`, `reason`, `imitates` (whose report the fault imitates; empty: it really happened)
- `recoveries`: `fault`; `parts`: seconds since the fault was applied (null: not seen); `lost_steps` (null: not known);
  `advice`: which waits were long, and which setting shortens them; `at_s`: when the fault was applied (CLOCK_MONOTONIC)
- `cases`: `name`, `kind` (assertion, faults, rollback), `verdict`, `reason`, `measured` and `bound` by name,
  `seconds` (the names of those figures that are durations)
- `steps`: the highest global step that counts (null: none was seen); `attempts`; `twin`; `versions`; `notes`

If scenarios were repeated, `repeats` has an entry for each of them: `scenario`, `asked`, `times`, `seeds`, `run_dirs`,
`verdict`, `reason`, `exit_code`; `rate` of the scenario and `cases` of each case: `passed`, `failed`, `inconclusive`,
and the bounds `low` and `high` of the true rate (each with `confidence`; null without SciPy); `figures`: `name`,
`seconds` (whether it is a duration), `count`, `unseen`, `min`, `median`, `p90`, `max`; `of_rate`: whether the
repetitions are judged together, so that one failure decides nothing.

Not-a-number and infinities are the strings "nan", "inf" and "-inf". `Result.from_json` reads one result back."""

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
    """Writes the results, and replaces the file in one step. Secrets in `reproduce` are masked. Raises OSError if the
    file can't be written."""
    shown = [replace(result, reproduce=mask(result.reproduce)) for result in results]
    found: dict[str, Any] = {"schema": SCHEMA, "results": [result.to_json() for result in shown]}
    if repeats:
        found["repeats"] = [as_json(one) for one in repeats]
    write_atomically(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
