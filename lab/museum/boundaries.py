"""Whether `torchaos bisect` names the release with which each bug ends, among all releases around it.

    python lab/museum/boundaries.py [--jobs DIR] [ROW ...]

Without --jobs, the verdict on a release is that of plain code, and only the search is tried. With --jobs, the command
itself is called, which runs the row's job under torchaos with each release that it tries; an interrupted call can be
continued. Exit code 1 if another release was named, or after more than log2(n) + 2 tries, rounded up.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import environments
import museum
import oracle
import sides

from torchaos.harness.minimize.package_bisect import Bisect, NotInstallable, Packages, Passed, Pins, Range
from torchaos.harness.scenario.yaml_source import dumped

SPANS = {
    "accelerate-3556": "accelerate=1.3.0..1.8.1",
    "accelerate-4071": "accelerate=1.10.0..1.15.0",
    "grain-1179": "grain=0.2.12..0.2.18",
    "ignite-3183": "pytorch-ignite=0.4.12..0.5.2",
    "litdata-217": "litdata=0.2.12..0.2.20",
    "pytorch-optimizer-558": "pytorch-optimizer=3.9.0..4.1.0",
    "pytorch-optimizer-576": "pytorch-optimizer=3.9.0..4.1.0",
    "pytorch-optimizer-607": "pytorch-optimizer=3.10.0..4.1.0",
    "pytorch-optimizer-610": "pytorch-optimizer=3.9.0..4.1.0",
    "torchdata-1437": "torchdata=0.8.0..0.11.0",
}


def searched(bug: museum.Bug, line: Range, packages: Packages) -> tuple[str, int]:
    """The sentence that names the release, and the number of tries, by the search and plain code."""

    def verdict(pins: Pins) -> Passed:
        try:
            return not sides.shown(bug, "affected", packages.path_with(pins)).differs
        except (RuntimeError, NotInstallable):
            return None

    search = Bisect([line], verdict)
    found = search()
    return "; ".join(map(str, found)), len(search.tried)


def commanded(bug: museum.Bug, packages: Packages, home: Path) -> tuple[str, int]:
    """The sentence that names the release, and the number of tries, by the command `torchaos bisect`."""
    home.mkdir(parents=True, exist_ok=True)
    job = bug.job("affected", packages.path)
    file = home / f"{bug.name}.yaml"
    file.write_text(dumped(oracle.scenario(job, oracle.shot(job, 0))))
    command = [sys.executable, "-m", "torchaos.harness", "bisect", str(file), SPANS[bug.name],
               "--assertion", bug.failed, "--out", str(home / bug.name)]  # fmt: skip
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    (home / f"{bug.name}.txt").write_text(said)
    tries = re.search(r"(\d+) sets of releases were tried", said)
    return "; ".join(row for row in said.splitlines() if row.startswith("the failure ")), int(tries[1]) if tries else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=Path, metavar="DIR", help="call the command, and keep its runs here")
    parser.add_argument("rows", nargs="*", metavar="ROW")
    options = parser.parse_args()
    rows, wrong = {bug.name: bug for bug in museum.rows()}, 0
    for name in options.rows or SPANS:
        bug, begun = rows[name], time.monotonic()
        packages = Packages(path=environments.made([sorted(bug.beside)]))
        line = Range.of(SPANS[name], packages.releases, None)
        said, tries = commanded(bug, packages, options.jobs) if options.jobs else searched(bug, line, packages)
        right = said.startswith(f"the failure ends with {line.package} {bug.fixed[line.package]}:") and ";" not in said
        right &= 0 < tries <= math.ceil(math.log2(len(line.releases))) + 2
        wrong += not right
        print(
            f"{'right' if right else 'WRONG'}  {name}: {tries} of {len(line.releases)} releases in "
            f"{time.monotonic() - begun:.0f} s: {said or 'no change was found'}",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
