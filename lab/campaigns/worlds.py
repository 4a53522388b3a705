"""Simulated trainers of many kinds (tests/support/worlds.py), each drawn from its number, so that any of them can be
looked at again. Counts how often the history gives their steps the right numbers, none, or wrong ones; with --defects,
how often the assertions find a defect of the resume and its cause; with --claims, how often a sentence of a verdict
about one or two defects is not true (tests/support/claim_truth.py).

    python lab/campaigns/worlds.py --count 100000 --jobs 2
    python lab/campaigns/worlds.py --defects --count 100
    python lab/campaigns/worlds.py --claims --count 1000"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import claim_truth
import worlds

_SHOWN = 20  # numbers of worlds of each outcome


def _placed(number: int) -> tuple[int, str, str]:
    """The number of the world, what was recorded of its state, and how its steps were placed."""
    world = worlds.drawn(random.Random(number))
    return number, f"state {world.state}", worlds.outcome(world)


def _judged(case: tuple[int, str]) -> tuple[int, str, str]:
    number, defect = case
    return number, defect or "healthy", worlds.judged(worlds.planted(number, defect))[0]


def _told(number: int) -> tuple[int, str, str]:
    world = worlds.composed(number)
    if worlds.outcome(world) == "wrong":
        return number, f"state {world.state}", "steps wrong"
    false = claim_truth.false_claims(worlds.failures(world), *worlds.truth(world))
    return number, f"state {world.state}", next((claim.partition(":")[0] for claim in false), "right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the number of the first world")
    parser.add_argument("--count", type=int, default=10_000, help="worlds, or with --defects, worlds for each defect")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--defects", action="store_true", help="plant defects, and judge")
    parser.add_argument("--claims", action="store_true", help="judge, and compare each sentence with the truth")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.count)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    which: dict[tuple[str, str], list[int]] = defaultdict(list)
    with multiprocessing.Pool(args.jobs) as pool:
        cases = [(number, defect) for defect in (*worlds.DEFECTS, "") for number in numbers]
        told = pool.imap_unordered(_judged, cases, 20) if args.defects else None
        told = told or pool.imap_unordered(_told if args.claims else _placed, numbers, 20)
        for number, group, outcome in told:
            found[group][outcome] += 1
            which[group, outcome].append(number)
    for group, outcomes in found.items():
        for outcome, times in outcomes.most_common():
            usual = outcome in ("right", "cause right", "passed" if group == "healthy" else "")
            shown = "" if usual else ", ".join(map(str, sorted(which[group, outcome])[:_SHOWN]))
            print(f"{group:28} {outcome:12} {times:7} of {outcomes.total()} ({times / outcomes.total():.2%})  {shown}")


if __name__ == "__main__":
    main()
