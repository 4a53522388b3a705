"""Whether the bugs of the museum are in the newest releases: lab/results/newest.md.

    python lab/museum/newest.py [--only NAME ...] [--write lab/results/newest.md]

For each row, the newest releases of its packages are installed, beside the packages that the row names, and the row's
trainer shows by plain code whether a resumed run does what a run in one go does. No job is run. Exit code 1 if a
resumed run differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import environments
import marks
import museum
import sides

from torchaos.harness.interfaces import ChaosError
from torchaos.harness.minimize.package_bisect import Packages


@cache
def newest(package: str) -> str:
    return Packages().releases(package)[-1]


def cells(bug: museum.Bug) -> tuple[str, str]:
    """The newest release of the row's package, and what plain code says about it. If it can't be run beside the
    packages that the row names, it is run with what pip finds that it needs."""
    package = next(iter(bug.fixed))
    pins = {package: newest(package)}
    said = ""
    for beside in [sorted(bug.beside), []] if bug.beside else [[]]:
        try:
            told = sides.shown(bug, "fixed", Packages(path=environments.made([beside])).path_with(pins))
        except (RuntimeError, ChaosError, subprocess.SubprocessError) as error:
            said = f"could not be run: {str(error).strip().splitlines()[-1][:150]}"
            continue
        said = f"**differs**: {told.shown}" if told.differs else "right"
        break
    return f"{package} {pins[package]}", said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--write", type=Path, nargs="+", metavar="PAGE", help="write the tables into these pages")
    options = parser.parse_args()
    lines = ["| newest release | the bug that it once had | a resumed run now | command |", "|---|---|---|---|"]
    for bug in museum.rows():
        if options.only and bug.name not in options.only:
            continue
        release, said = cells(bug)
        link = f"[{bug.name}]({bug.report}): {bug.about}"
        cell = [release, link, said, f"`python lab/museum/newest.py --only {bug.name}`"]
        lines.append("| " + " | ".join(word.replace("|", "/") for word in cell) + " |")
        print(f"{said.partition(':')[0]:>16}  {bug.name} with {release}  {said.partition(':')[2]}", flush=True)
    if options.write:
        marks.write(options.write, {"newest": "\n".join(lines)})
    return int(any("**differs**" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
