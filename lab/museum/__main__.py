"""The museum of real bugs: what released frameworks lost after a restart, and whether torchaos finds it.

python lab/museum [--only NAME ...] [--plain] [--again] [--out DIR] [--minutes M] [--keep] [--write
PAGE ...]

For each row in rows/ and each of its two sides (affected and fixed version): makes the environment, shows the bug by
plain code without torchaos, runs the trainer under torchaos, and appends the result to DIR/results.jsonl. A side with a
result there is not run again unless --again is given, so an interrupted call can be continued. The table counts the
results in lab/museum/results.jsonl too, which are older. --plain makes the environments and shows the bugs, and runs no
job. Exit code 1 if the result of a side is not as its row says."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import environments
import marks
import museum
import museum_page
import sides

from torchaos.harness.interfaces import ChaosError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument(
        "--plain", action="store_true", help="make the environments and show the bugs by plain code only"
    )
    parser.add_argument("--again", action="store_true", help="run sides that have a result too")
    parser.add_argument("--out", type=Path, default=Path("museum"), help="results and kept run directories")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no side after so long")
    parser.add_argument("--keep", action="store_true", help="keep each run directory")
    parser.add_argument("--write", type=Path, nargs="+", metavar="PAGE", help="write the tables into these pages")
    options = parser.parse_args()
    every = {bug.name: bug for bug in museum.rows()}
    if unknown := [name for name in options.only if name not in every]:
        parser.error(f"there is no row {unknown[0]}")
    bugs = [every[name] for name in options.only or every]
    options.out.mkdir(parents=True, exist_ok=True)
    results, end_s = options.out / "results.jsonl", time.monotonic() + 60 * options.minutes
    ran = set() if options.again or options.plain else {(told.bug, told.side) for told in sides.read(results)}
    bad = False
    for bug, side in ((bug, side) for bug in bugs for side in museum.SIDES if (bug.name, side) not in ran):
        if time.monotonic() > end_s:
            break
        try:
            packages = environments.made(bug.packages(side))
            told = sides.shown(bug, side, packages)
        except (RuntimeError, ChaosError, subprocess.SubprocessError) as error:
            print(f"NOT SHOWN  {bug.name} {side}: {error}", flush=True)
            bad = True
            continue
        print(
            f"{'  shown' if told.is_shown() else 'NOT SHOWN'}  {bug.name} {side}: {told.shown or 'equal'}", flush=True
        )
        if options.plain:
            bad |= not told.is_shown()
            continue
        told = sides.judged(bug, told, packages, options.out / "runs", options.keep)
        with open(results, "a") as file:
            file.write(told.to_json() + "\n")
        mark = "  right" if told.is_right(bug) else "  WRONG"
        print(f"{mark}  {bug.name} {side}: {told.verdict} ({told.seconds:.0f} s)  {told.reason}", flush=True)
    if options.plain:
        return int(bad)
    done = [*sides.read(museum.KEPT), *sides.read(results)]
    print("\n".join(museum_page.summary(bugs, done)))
    if options.write:
        marks.write(options.write, museum_page.tables(bugs, done))
    last = museum_page.last(done)
    return int(any((bug.name, side) in last and not last[bug.name, side].is_right(bug)
                   for bug in bugs for side in museum.SIDES))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
