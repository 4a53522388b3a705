"""Places the attempts of many simulated trainers (tests/support/worlds.py), and counts how often the steps are right,
not known, or wrong. Each world is drawn from its number, so that any of them can be looked at again.

    python ci/campaigns/worlds.py --count 100000 --jobs 2"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import worlds

_SHOWN = 20  # numbers of worlds of each outcome


def _outcome(number: int) -> tuple[int, str, str]:
    """The number of the world, what was recorded of its state, and the outcome."""
    world = worlds.drawn(random.Random(number))
    return number, world.state, worlds.outcome(world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the number of the first world")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    found, numbers = Counter[tuple[str, str]](), dict[tuple[str, str], list[int]]()
    with multiprocessing.Pool(args.jobs) as pool:
        for number, state, outcome in pool.imap_unordered(_outcome, range(args.first, args.first + args.count), 100):
            found[state, outcome] += 1
            if outcome != "right":
                numbers.setdefault((state, outcome), []).append(number)
    for (state, outcome), times in sorted(found.items()):
        of_state = sum(count for (other, _outcome), count in found.items() if other == state)
        shown = ", ".join(map(str, sorted(numbers.get((state, outcome), []))[:_SHOWN]))
        print(f"state {state:6} {outcome:8} {times:7} of {of_state} ({times / of_state:.2%})  {shown}")


if __name__ == "__main__":
    main()
