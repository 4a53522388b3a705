"""A recorded run to copy and change: 14 steps and a twin; a rank is killed in step 12, another stopped in 13."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.record.result import Result
from torchaos.harness.record.rundir import RunDir

RECORDED = Path(__file__).parents[1] / "fuzz" / "corpus" / "run"


def recorded(to: Path) -> RunDir:
    """A copy at `to`, which must not exist yet."""
    return RunDir(Path(shutil.copytree(RECORDED, to)))


def judged(folder: RunDir) -> Result:
    """The run's result, also written into it as `torchaos run` does."""
    result = judge(folder)
    folder.result.write_text(json.dumps(result.to_json()))
    return result


def change_events(folder: RunDir, source: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Call `change` with each event of the files whose names begin with `source`."""
    for path in folder.events.glob(f"{source}*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in events:
            change(event)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))


def lose(step: int, by: float = 0.5) -> Callable[[dict[str, Any]], None]:
    """A change for `change_events`: the loss of that step of an attempt is higher by `by`."""

    def change(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == step:
            event["data"]["losses"] = [value + by for value in event["data"]["losses"]]

    return change
