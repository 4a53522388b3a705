"""Writes the requested and the measured network faults into a page: measured_table.py PAGE.md RESULTS.json ...

RESULTS.json is the output of `torchaos run SCENARIO --json RESULTS.json`. The table is between the two marks of the
page; a scenario that is not in the results keeps its lines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import marks

HEAD = "| scenario | fault | | asked | measured |\n|---|---|---|---|---|\n"
UNITS = {"ms": "ms", "percent": "%", "mbit": "Mbit/s"}


def main(page: Path, files: list[Path]) -> None:
    old = marks.between(page.read_text(), "measured")
    lines: dict[str, list[str]] = {}
    for line in old.splitlines()[3:]:
        lines.setdefault(line.split("|")[1].strip(), []).append(line)
    for file in files:
        for result in json.loads(file.read_text())["results"]:
            if found := [line for fault in result["faults"] for line in _lines(result["scenario"], fault)]:
                lines[result["scenario"]] = found
    rows = "\n".join(line for name in sorted(lines) for line in lines[name])
    marks.write([page], {"measured": HEAD + rows})


def _lines(scenario: str, fault: dict[str, Any]) -> list[str]:
    found = []
    for name, both in fault.get("measured", {}).items():
        what, _, unit = name.rpartition("_")
        asked, measured = (f"{both[key]:.4g} {UNITS.get(unit, unit)}" for key in ("asked", "measured"))
        found.append(f"| {scenario} | `{fault['inject']}` | {what} | {asked} | {measured} |")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
