"""An exploration as JSON, for other programs.

- `result`: as in the JSON of a run; its cases are the classes of outcomes
- `states`: how many a death can leave; `tried`; `classes`: how many states by class; `unconfirmed`: how many of these
  only forked ranks have shown, and no cold start
- `fatal_share`: the part of the run's time (of which the states were tried) in which a death of all processes is fatal:
  the job does not start again, hangs or goes on wrongly. null: no such time was tried; `fatal_s`, `tried_s`: seconds;
  `unconfirmed_fatal_s`: the seconds of `fatal_s` that only forked ranks have shown
- `outcomes`: one for each state: `state` (its name), `digest` (of its files), `model`, `died_at_step`, `kind` (the
  class), `reason`, `assertion` (which one says so), `lost_steps` (null: none, or not known), `from_step` (null: not
  known), `mended` (whether a second start got past the death; null: there was none), `warm`, `confirmed` (false: only
  forked ranks have shown the failure), `seconds`, `operations`, `last_operation`, `moments` (seconds since the
  recording began, from and until), `files` (what is there of each), `run_dir` (empty: not kept)
- `started`: how resumes were started; `unfinished`; `notes`; `unsure`: what the recorder could not see
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torchaos.harness.exploring.explored import Explored
from torchaos.harness.exploring.outcomes import Class
from torchaos.harness.exploring.suspected import is_suspected
from torchaos.harness.record.result import Result


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
