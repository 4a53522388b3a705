"""A stand-in for the command `torchaos`: leaves a recorded run with the verdict that the scenario's name requests. Each
call is written to the file `calls` of the working directory, and the times of its begin and end to `times`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "fuzz" / "corpus" / "run"  # tests/support/recorded.py, without its imports
CODES = {"passed": 0, "failed": 1, "inconclusive": 2, "error": 4}


def main() -> int:
    began = time.monotonic()
    code = run()
    with open("times", "a") as file:
        file.write(json.dumps([began, time.monotonic()]) + "\n")
    return code


def run() -> int:
    words = sys.argv[1:]
    scenario, out, results = (Path(words[number]) for number in (1, 3, 5))
    with open("calls", "a") as file:
        file.write(
            json.dumps({"scenario": scenario.stem, "words": words[6:], "command": words[0], "at": time.monotonic()})
            + "\n"
        )
    if scenario.stem == "unusable":
        print(f"{scenario}:3:5: no such key; did you mean job?", file=sys.stderr)
        return 3
    try:
        time.sleep({"slow": 60.0, "good-0": 1.0, "good-1": 1.0}.get(scenario.stem, 0.0))
    except KeyboardInterrupt:
        Path("interrupted").touch()
        raise
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(shutil.copytree(RECORDED, out / f"{scenario.stem}-{os.getpid()}"))
    raw = json.loads((folder / "result.json").read_text()) | {"run_dir": str(folder), "scenario": scenario.stem}
    change(raw, scenario.stem)
    found: dict[str, Any] = {"schema": 1, "results": [raw]}
    if scenario.stem.startswith("often"):
        failed = json.loads(json.dumps(raw))
        change(failed, "bad")
        verdict = "failed" if scenario.stem == "often" else "passed"
        found["results"] = [raw, failed, raw]
        found["repeats"] = [{
            "verdict": verdict, "reason": "2 of 3 passed", "exit_code": CODES[verdict], "asked": "all of 3",
            "rate": {"passed": 2, "failed": 1, "inconclusive": 0},
        }]  # fmt: skip
        raw = found["repeats"][0]
    results.write_text(json.dumps({"schema": 1, "result": raw} if words[0] == "explore" else found))
    return int(raw["exit_code"])


def change(raw: dict[str, Any], name: str) -> None:
    def of(case: str, verdict: str, reason: str) -> None:
        next(one for one in raw["cases"] if one["name"] == case).update(verdict=verdict, reason=reason)
        raw.update(verdict=verdict, reason=f"{case}: {reason}", exit_code=CODES[verdict], decided_by=case)

    if name.startswith("bad"):
        of("recovery_time", "failed", "caught up 71.50 s after the fault, and 60 s are allowed")
        if name == "bad-data":
            shown = {"cause": "the sampler restarted", "bound": {"tolerance": 0, "basis": "bitwise"}, "measured": {}}
            next(one for one in raw["cases"] if one["name"] == "loss_continuity").update(shown)
            of("loss_continuity", "failed", "the loss of rank 0 in step 16 is 2.5, and 2.4 in the twin")
    elif name == "unfelt":
        of("faults", "inconclusive", "process.kill: nothing shows that it was felt")
    elif name == "unseen":
        of("sample_accounting", "inconclusive", "no sample was seen")
    elif name == "dirty":
        of("rollback", "error", "process.freeze could not be taken back")


if __name__ == "__main__":
    sys.exit(main())
