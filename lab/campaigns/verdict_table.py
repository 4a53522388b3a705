"""Writes the results of scenarios into a page: verdict_table.py PAGE.md RESULTS.json ...

RESULTS.json is the output of `torchaos run SCENARIO --json RESULTS.json`. The table is between the two marks of the
page; a scenario that is not in the results, or was not run to its end, keeps its line.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import marks

HEAD = "| scenario | fault | felt by | recovery | verdict |\n|---|---|---|---|---|\n"


def main(page: Path, files: list[Path]) -> None:
    old = marks.between(page.read_text(), "verdicts")
    lines = {name: line for line in old.splitlines() if (name := _name(line))}
    for file in files:
        for result in json.loads(file.read_text())["results"]:
            if result["verdict"] != "error":
                lines[result["scenario"]] = _line(result)
    rows = "\n".join(lines[name] for name in sorted(lines))
    marks.write([page], {"verdicts": HEAD + rows})


def _name(line: str) -> str:
    found = re.match(r"\| ([a-z0-9-]+) \|", line)
    return found[1] if found and found[1] != "scenario" else ""


def _line(result: dict[str, Any]) -> str:
    faults = result["faults"]
    cells = (
        result["scenario"], _join(f"`{fault['inject']}`, {fault['target']}" for fault in faults),
        _join(fault["evidence"] or "not felt" for fault in faults), _join(map(_recovery, result["recoveries"])),
        result["verdict"] if result["verdict"] == "passed" else f"**{result['verdict']}**: {result['reason']}",
    )  # fmt: skip
    return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "/") for cell in cells) + " |"


def _recovery(recovery: dict[str, Any]) -> str:
    caught_up, lost = recovery["parts"]["caught_up"], recovery["lost_steps"]
    return "never" if caught_up is None else f"{caught_up:.1f} s" + (f", {lost} steps again" if lost else "")


def _join(parts: Any) -> str:
    return "; ".join(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
