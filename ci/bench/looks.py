"""Measures how much a look at a run in progress costs after each hour of the run. A look asks whether the job has
recovered, as game days do ten times a second. It is compared with a look at the same events in a plain list, which is
read from its start each time.

Usage: python ci/bench/looks.py [--hours 8] [--ranks 2]"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from judge import STEP_S, Grown

from torchaos.harness.record.events.journal import Journal, read_events
from torchaos.harness.running.conditions.seen import Recovered

LOOKS = 3  # looks; the fastest one counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        steps = int(options.hours * 3600 / STEP_S)
        events = read_events(Grown(Path(place) / "run", options.ranks, steps, 8, twin=False).run.events)
        (Path(place) / "live").mkdir()
        journal = Journal(Path(place) / "live")
        condition, began_s, done = Recovered(faults=["process.kill"], lethal=["process.kill"]), events[0].mono_s, 0
        for hour in range(1, options.hours + 1):
            now_s = began_s + hour * 3600
            end = next((place for place in range(done, len(events)) if events[place].mono_s > now_s), len(events))
            journal.take(events[done:end])
            done, at_s = end, events[end - 1].mono_s
            first = _seconds(condition, journal, at_s)
            looks = [_seconds(condition, journal, at_s) for _ in range(LOOKS)]
            plain = _seconds(condition, journal, at_s, plain=True)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"hour {hour}: {end} events; {min(looks) * 1e3:.1f} ms a look ({first * 1e3:.0f} ms with an hour of "
                f"news), {plain * 1e3:.0f} ms from a plain list, {plain / min(looks):.0f} times; {memory:.0f} MiB",
                flush=True,
            )
        journal.close()
    return 0


def _seconds(condition: Recovered, journal: Journal, now_s: float, plain: bool = False) -> float:
    start = time.process_time()
    events = journal.snapshot()
    condition.holds(list(events) if plain else events, now_s)
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
