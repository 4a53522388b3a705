"""Whether the search of `torchaos bisect` names the release with which each bug ends, among all releases around it.

    python ci/museum/boundaries.py [ROW ...]

The releases are pip's, and each gets its folder as in `torchaos bisect`. The verdict on a release is that of plain
code, because a run under torchaos takes minutes. Exit code 1 if another release was named, or after more than
log2(n) + 2 tries, rounded up.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import environments
import museum
import sides

from torchaos.harness.narrowing.bisect import Bisect, Passed, Pins, Range
from torchaos.harness.narrowing.packages import NotInstallable, Packages

SPANS = {
    "accelerate-3556": "accelerate=1.3.0..1.8.1",
    "accelerate-4071": "accelerate=1.10.0..1.15.0",
    "grain-1179": "grain=0.2.12..0.2.18",
    "ignite-3183": "pytorch-ignite=0.4.12..0.5.2",
    "litdata-217": "litdata=0.2.12..0.2.20",
    "pytorch-optimizer-558": "pytorch-optimizer=3.9.0..4.1.0",
    "pytorch-optimizer-576": "pytorch-optimizer=3.9.0..4.1.0",
    "pytorch-optimizer-607": "pytorch-optimizer=3.9.0..4.1.0",
    "pytorch-optimizer-610": "pytorch-optimizer=3.9.0..4.1.0",
    "torchdata-1437": "torchdata=0.8.0..0.11.0",
}


def main(names: list[str]) -> int:
    rows = {bug.name: bug for bug in museum.rows()}
    wrong = 0
    for name in names or SPANS:
        bug = rows[name]
        packages = Packages(path=environments.made([sorted(bug.beside)]))

        def verdict(pins: Pins, bug: museum.Bug = bug, packages: Packages = packages) -> Passed:
            try:
                return not sides.shown(bug, "affected", packages.path_with(pins)).differs
            except (RuntimeError, NotInstallable):
                return None

        line = Range.of(SPANS[name], packages.releases, None)
        search = Bisect([line], verdict)
        found, tries = search(), len(search.tried)
        right = [one.after for one in found] == [bug.fixed[line.package]] and all(one.is_exact for one in found)
        right &= tries <= math.ceil(math.log2(len(line.releases))) + 2
        wrong += not right
        said = "; ".join(map(str, found)) or "no change was found"
        print(f"{'right' if right else 'WRONG'}  {name}: {tries} of {len(line.releases)} releases: {said}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
