"""Makes the table of the systems and techniques of the field, and of what covers each here, from systems.yaml.

    python lab/systems.py [--test ROW ...] [--write PAGE]

Without an option, the table is printed. --test runs the tests of these rows, and the table tells when and with which
result. Other rows keep what the page says. Verdicts of scenarios are those of lab/results/teeth.md, with the day on
which they were recorded. The exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import marks

REPOSITORY = Path(__file__).parents[1]
TEETH, PAGE = REPOSITORY / "lab" / "results" / "teeth.md", REPOSITORY / "lab" / "results" / "systems.md"
TESTED = re.compile(r"its tests (passed|failed|skipped) \d{4}-\d\d-\d\d")


@dataclass(frozen=True)
class System:
    """One row. systems.yaml explains the fields."""

    number: int
    system: str
    state: Literal["works", "partly", "missing"]
    scenarios: Sequence[str] = ()
    bench: Sequence[str] = ()
    asserts: Sequence[str] = ()
    tests: Sequence[str] = ()
    lacks: str = ""


def systems() -> list[System]:
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return [System(number, **row) for number, row in rows.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", type=int, nargs="+", default=[], metavar="ROW", help="run the tests of these rows")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    rows = systems()
    tested = tested_on(PAGE.read_text()) if PAGE.exists() else {}
    for row in (row for row in rows if row.number in options.test and row.tests):
        tested[row.number] = f"its tests {result_of(row.tests)} {datetime.date.today()}"
        print(f"{row.number} {row.system}: {tested[row.number]}", flush=True)
    text = table(rows, tested, verdicts())
    if options.write:
        marks.write([options.write], {"systems": text})
    else:
        print(text)
    return int(any(" failed " in tested.get(number, "") for number in options.test))


def tested_on(page: str) -> dict[int, str]:
    """What the page says of the tests of each row."""
    lines = (line.split("|") for line in marks.between(page, "systems").splitlines() if line.startswith("| "))
    found = {cells[1].strip(): TESTED.search("|".join(cells)) for cells in lines}
    return {int(number): match[0] for number, match in found.items() if match and number.isdecimal()}


def result_of(tests: Sequence[str]) -> str:
    """passed, failed or, if none of them could run here, skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *tests]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        return "failed"
    return "passed" if re.search(r"\d+ passed", done.stdout) else "skipped"


def verdicts() -> dict[str, str]:
    """What lab/results/teeth.md says of each ready scenario, and the day on which that was recorded."""
    command = ["git", "blame", "--line-porcelain", str(TEETH)]
    blamed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    scenario, day = "", ""
    for line in blamed.splitlines():
        if line.startswith("author-time "):
            day = f"{datetime.datetime.fromtimestamp(int(line.split()[1]), datetime.timezone.utc):%Y-%m-%d}"
        if not line.startswith("\t| "):
            continue
        name, as_it_is, _tooth, verdict, *_rest = (cell.strip(" `") for cell in line.strip("\t|").split("|"))
        if "/" in name:
            scenario = name
            found[scenario] = f"{as_it_is} {day}" if as_it_is else "not run"
        if verdict == "failed" and scenario:
            found[scenario] = found[scenario].partition(",")[0] + ", its defect failed"
    return found


def table(rows: Sequence[System], tested: Mapping[int, str], ran: Mapping[str, str]) -> str:
    count = Counter(row.state for row in rows)
    lines = [
        f"{len(rows)} systems: {count['works']} work, {count['partly']} partly, {count['missing']} missing.",
        "",
        "| | system | state | judged by | shown by, and its last run | not shown |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = [f"`{name}`: {ran.get(name, 'not run')}" for name in row.scenarios]
        shown += [f"`{name}`" for name in (*row.bench, *row.tests)]
        shown += [tested[row.number]] if row.number in tested and row.tests else []
        cells = [str(row.number), row.system, row.state, ", ".join(row.asserts), "; ".join(shown), row.lacks]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
