"""Runs the bench of broken, healthy and noisy trainers, and counts how often the verdict is right.

    python lab/campaigns/oracle.py [--only NAME ...] [--kind KIND ...] [--sample N] [--healthy N] [--first N]
                                  [--out DIR] [--minutes M] [--keep] [--again] [--write PAGE ...]

Each result is a line in DIR/results.jsonl, and is not run again: an interrupted call can be continued. --only and
--kind choose trainers, --sample draws N of them. --healthy is the total number of healthy runs, and --first the number
of the first of them: another number draws other seeds and faults. The run directory of a wrong verdict is kept, with
--keep that of each verdict. With --again, runs that were kept are first judged again by the current assertions. --write
fills the marks `score` and `score-summary`: lab/results/score.md, docs/measured/right-verdicts.md. Exit code 1 if a
verdict was wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import oracle
from marks import write
from scoring import summary, tables

from torchaos.harness.host.disk import write_atomically


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this trainer, by its name")
    parser.add_argument("--kind", action="append", default=[], choices=get_args(oracle.Kind))
    parser.add_argument("--sample", type=int, metavar="N", help="draw N of the trainers")
    parser.add_argument("--healthy", type=int, default=200, metavar="N", help="healthy runs in all (default 200)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="where their numbers begin (default 0)")
    parser.add_argument("--out", type=Path, default=Path("oracle"), help="results and kept run directories")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--keep", action="store_true", help="keep each run directory")
    parser.add_argument("--again", action="store_true", help="judge the kept run directories again")
    parser.add_argument("--write", type=Path, nargs="+", metavar="PAGE", help="write the tables into these pages")
    options = parser.parse_args()
    trainers = [
        trainer for trainer in oracle.table()
        if (not options.only or trainer.name in options.only) and (not options.kind or trainer.kind in options.kind)
    ]  # fmt: skip
    if options.sample:
        trainers = random.Random(0).sample(trainers, min(options.sample, len(trainers)))
    options.out.mkdir(parents=True, exist_ok=True)
    results, end_s = options.out / "results.jsonl", time.monotonic() + 60 * options.minutes
    if options.again:
        anew = [oracle.judged_again(result) for result in oracle.read(results)]
        write_atomically(results, "".join(result.to_json() + "\n" for result in anew))
    for absent in (trainer for trainer in trainers if trainer.lacks):
        print(f"{absent.name}: not run, {absent.lacks}", flush=True)
    there = [trainer for trainer in trainers if not trainer.lacks]
    for trainer, shot in oracle.due(there, oracle.read(results), options.healthy, options.first):
        if time.monotonic() > end_s:
            break
        told = oracle.run(trainer, shot, options.out / "runs", options.keep)
        with open(results, "a") as file:
            file.write(told.to_json() + "\n")
        by_luck = trainer.kind == "broken" and trainer.repeat > 1
        luck = by_luck and told.verdict == "passed"
        mark = "right" if oracle.is_right(trainer, told) else "luck?" if luck else "WRONG"
        print(
            f"{mark}  {trainer.name} #{shot.number}: {told.verdict} ({told.seconds:.0f} s)  {told.reason}", flush=True
        )
    done = [result for result in oracle.read(results) if result.shot.trainer in {trainer.name for trainer in trainers}]
    print(summary(trainers, done))
    if options.write:
        write(options.write, tables(trainers, done))
    return 1 if any(oracle.wrong(t, [result for result in done if result.shot.trainer == t.name]) for t in there) else 0


if __name__ == "__main__":
    sys.exit(main())
