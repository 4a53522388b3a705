"""Measures how much a look at a run in progress costs after each hour of the run, and how its memory grows. The events
are written to files minute by minute, as agents write them, and the journal follows these files. A look asks whether
the job has recovered, as game days do ten times a second. It is compared with a look at the same events in a plain
list, which is read from its start each time (in another process, so that its memory is not counted).

With --round, the hours are divided into rounds, each in a process of its own, as game days do: 0.5 is their default.

Usage: python lab/bench/looks.py [--hours 8] [--ranks 2] [--round HOURS]"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from multiprocessing import get_context
from pathlib import Path

from judge import STEP_S, Grown

from torchaos.harness.host.processes import give_back
from torchaos.harness.protocol.wire import Event
from torchaos.harness.record.events.journal import Journal, read_events
from torchaos.harness.running.conditions.progress import Recovered

LOOKS = 3  # looks; the fastest one counts
MINUTE_S, HOUR_S = 60.0, 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--round", type=float, metavar="HOURS")
    options = parser.parse_args()
    if options.round is None:
        watch(options.hours, options.ranks, HOUR_S)
        return 0
    for number in range(1, round(options.hours / options.round) + 1):
        print(f"round {number}, {number * options.round:g} hours", end=": ", flush=True)
        process = get_context("spawn").Process(target=watch, args=(options.round, options.ranks))
        process.start()
        process.join()
    print(f"memory of the process that starts the rounds: {_memory():.0f} MiB")
    return 0


def watch(hours: float, ranks: int, every_s: float | None = None) -> None:
    """Follows a run of that length, with a look each minute. Prints what a look costs, each `every_s` seconds of the
    run; None: at its end."""
    end_s = hours * HOUR_S
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        live = Path(place) / "live"
        live.mkdir()
        grown = Grown(Path(place) / "run", ranks, int(end_s / STEP_S), 8, twin=False)
        agents = [Agent(path, live) for path in sorted(grown.run.events.glob("*.jsonl"))]
        del grown
        gc.collect()
        give_back()  # what it took to make the events
        journal = stack.enter_context(closing(Journal(live, "controller")))
        stack.callback(lambda: [agent.close() for agent in agents])
        condition, written, at_s = Recovered(faults=["process.kill"], lethal=["process.kill"]), 0, 0.0
        while at_s < end_s:
            at_s += MINUTE_S
            written += sum(agent.write(at_s) for agent in agents)
            while journal.count < written:
                time.sleep(0.002)
            first = _seconds(condition, journal, at_s)
            if at_s % (every_s or end_s) == 0:
                memory = _memory()
                looks = min(_seconds(condition, journal, at_s) for _ in range(LOOKS))
                with get_context("fork").Pool(1) as pool:
                    plain = pool.apply(_plain, (str(live), at_s))
                print(
                    f"hour {at_s / HOUR_S:g}: {written} events; {looks * 1e3:.1f} ms a look ({first * 1e3:.1f} ms with "
                    f"a minute of news), {plain * 1e3:.0f} ms from a plain list, {plain / looks:.0f} times; "
                    f"{memory:.0f} MiB",
                    flush=True,
                )


class Agent:
    """Writes the lines of a recorded file again, in parts."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._lines, self._waiting = open(source, "rb"), b""  # noqa: SIM115  # until `close`
        self._file = open(folder / source.name, "wb", buffering=0)  # noqa: SIM115

    def write(self, until_s: float) -> int:
        """Writes the lines up to that time. Returns their number."""
        lines = []
        while line := self._waiting or self._lines.readline():
            self._waiting = b""
            if Event.from_line(line).mono_s > until_s:
                self._waiting = line
                break
            lines.append(line)
        self._file.write(b"".join(lines))
        return len(lines)

    def close(self) -> None:
        self._lines.close()
        self._file.close()


def _memory() -> float:
    """MiB of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _seconds(condition: Recovered, journal: Journal, now_s: float) -> float:
    start = time.process_time()
    condition.holds(journal.snapshot(), now_s)
    return time.process_time() - start


def _plain(folder: str, now_s: float) -> float:
    events, start = read_events(Path(folder)), time.process_time()
    Recovered(faults=["process.kill"], lethal=["process.kill"]).holds(events, now_s)
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
