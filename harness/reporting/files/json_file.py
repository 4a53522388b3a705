"""Results as JSON, for dashboards, for trends and for other programs: of runs, and of explorations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchaos.harness.crash_explorer.exploration_summary import Explored
from torchaos.harness.crash_explorer.resume_outcomes import Class, is_suspected
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.record.result import SCHEMA, Result
from torchaos.harness.record.secrecy import mask
from torchaos.harness.release.repeats import Repeats
from torchaos.harness.reporting.terminal.many_runs import as_json

# Results as JSON, for dashboards and for trends.
#
# `{"schema": 1, "results": [...]}`; each result has the same form as result.json in a run directory:
#
# - `schema`: increased when older readers would misunderstand the new form. Added keys do not increase it.
# - `scenario`, `description`, `seed`, `reproduce` (command line), `run_dir`, `started` (ISO 8601, UTC), `duration_s`
# - `verdict`: passed, failed, inconclusive or error; `reason`: one line; `exit_code`: that of this scenario alone;
#   `decided_by`: the case that decided, empty if none did
# - `faults`: `id`, `inject`, `target`, `planned`, `applied` (null: never landed), `evidence` (null: not felt),
#   `rollback`, `verdict`, `reason`, `imitates` (whose report the fault imitates), `replays` (what really said what
#   it says again); both empty: it really happened
# - `recoveries`: `fault`; `parts`: seconds since the fault was applied (null: not seen); `lost_steps` (null: not
#   known); `advice`: which waits were long, and which setting shortens them; `at_s`: when the fault was applied
#   (CLOCK_MONOTONIC)
# - `cases`: `name`, `kind` (assertion, faults, rollback), `verdict`, `reason`, `measured` and `bound` by name,
#   `seconds` (the names of those figures that are durations)
# - `steps`: the highest global step that counts (null: none was seen); `attempts`; `twin`; `versions`; `notes`
# If scenarios were repeated, `repeats` has an entry for each of them: `scenario`, `asked`, `times`, `seeds`,
# `run_dirs`, `verdict`, `reason`, `exit_code`; `rate` of the scenario and `cases` of each case: `passed`, `failed`,
# `inconclusive`, and the bounds `low` and `high` of the true rate (each with `confidence`; null without SciPy);
# `figures`: `name`, `seconds` (whether it is a duration), `count`, `unseen`, `min`, `median`, `p90`, `max`; `of_rate`:
# whether the repetitions are judged together, so that one failure decides nothing.
#
# Not-a-number and infinities are the strings "nan", "inf" and "-inf". `Result.from_json` reads one result back.


def write(results: Sequence[Result], path: Path, repeats: Sequence[Repeats] = ()) -> None:
    """Writes the results, and replaces the file in one step. Secrets in `reproduce` are masked. Raises OSError if the
    file can't be written."""
    shown = [replace(result, reproduce=mask(result.reproduce)) for result in results]
    found: dict[str, Any] = {"schema": SCHEMA, "results": [result.to_json() for result in shown]}
    if repeats:
        found["repeats"] = [as_json(one) for one in repeats]
    write_atomically(path, json.dumps(found, indent=1, allow_nan=False) + "\n")


# An exploration as JSON, for other programs.
#
# - `result`: as in the JSON of a run; its cases are the classes of outcomes
# - `states`: how many a death can leave; `tried`; `classes`: how many states by class; `unconfirmed`: how many of these
#   only forked ranks have shown, and no cold start
# - `fatal_share`: the part of the run's time (of which the states were tried) in which a death of all processes is
#   fatal: the job does not start again, hangs or goes on wrongly. null: no such time was tried; `fatal_s`, `tried_s`:
#   seconds; `unconfirmed_fatal_s`: the seconds of `fatal_s` that only forked ranks have shown
# - `outcomes`: one for each state: `state` (its name), `digest` (of its files), `model`, `died_at_step`, `kind` (the
#   class), `reason`, `assertion` (which one says so), `lost_steps` (null: none, or not known), `from_step` (null: not
#   known), `mended` (whether a second start got past the death; null: there was none), `warm`, `confirmed` (false: only
#   forked ranks have shown the failure), `seconds`, `operations`, `last_operation`, `moments` (seconds since the
#   recording began, from and until), `files` (what is there of each), `run_dir` (empty: not kept)
# - `started`: how resumes were started; `unfinished`; `notes`; `unsure`: what the recorder could not see


def to_json(found: Explored, result: Result) -> dict[str, Any]:
    began_s = found.recording.began_s
    counts = Counter(one.kind.value for one in found.outcomes)
    unconfirmed = {kind.value: count for kind in Class if (count := found.unconfirmed(kind))}
    outcomes = [
        {
            **one.to_json(), "confirmed": not is_suspected(one),
            "moments": [[round(at_s - began_s, 4) for at_s in moment] for moment in one.moments],
        }
        for one in found.outcomes
    ]  # fmt: skip
    return {
        "schema": 1, "result": result.to_json(), "states": found.choice.in_all, "tried": len(outcomes),
        "classes": dict(counts), "unconfirmed": unconfirmed, "fatal_share": found.fatal_share,
        "fatal_s": round(found.fatal_s, 4), "unconfirmed_fatal_s": round(found.unconfirmed_fatal_s, 4),
        "tried_s": round(found.tried_s, 4), "outcomes": outcomes, "started": found.warm,
        "unfinished": found.unfinished, "notes": list(found.notes), "unsure": list(found.recording.unsure),
    }  # fmt: skip
