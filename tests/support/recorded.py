"""A real run as it was recorded (a rank is killed in step 12, the other stopped in step 13, 14 steps, a twin), to be
copied and changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchaos.harness.judging.verdict.verdict import judge
from torchaos.harness.record.result import Result
from torchaos.harness.record.rundir import RunDir

RECORDED = Path(__file__).parents[1] / "fuzz" / "corpus" / "run"


def recorded(to: Path) -> RunDir:
    """A copy that may be changed. `to` must not be there yet."""
    return RunDir(Path(shutil.copytree(RECORDED, to)))


def judged(folder: RunDir) -> Result:
    """Its result, also left in it as `torchaos run` would."""
    result = judge(folder)
    folder.result.write_text(json.dumps(result.to_json()))
    return result


def change_events(folder: RunDir, source: str, change: Callable[[dict[str, Any]], None]) -> None:
    """`change` is called with each event of the files whose names begin with `source`."""
    for path in folder.events.glob(f"{source}*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            change(event)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))


def lose(step: int, by: float = 0.5) -> Callable[[dict[str, Any]], None]:
    """A loss that differs in that step of an attempt."""

    def change(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == step:
            event["data"]["losses"] = [value + by for value in event["data"]["losses"]]

    return change
