"""Kills the parts of runs on a real Slurm cluster, and counts what is left on any node: it must be nothing.

    python lab/campaigns/cluster_deaths.py --table FILE [--count N] [--seed S] [--jobs N] [--minutes M] [--only KIND]

Each run at a time has a cluster of its own, of two nodes, which are namespaces of this machine; the job is a stand-in
for torchrun. These die:
torchaos on the head node, its reaper, both; the agent of a node, its reaper, both; each at a point of its own journal
or undo log. The pipes to the agents, the srun of the job, the job's step, the allocation, Slurm's controller, and a
whole node die at an event of the journal; the node comes back when torchaos has ended. The ranks have equal pids on
their nodes, so each run also shows that the evidence is of the right node. A call goes on where the table ends.
Exit code 1 if anything was left, or was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from clusters.deaths import BOUND_S, FROM_OUTSIDE, NOBODY, WHERE, Death, Outcome, play
from clusters.slurm import Slurm, cluster, missing
from dying.campaign import compile_all, points_of

WHO = (("harness",), ("reaper",), ("harness", "reaper"))


def main() -> int:
    options, start_s = parsed(), time.monotonic()
    if lacks := missing():
        print(lacks)
        return 3
    compile_all()
    table = Table(options.table)
    with ExitStack() as stack:
        free: SimpleQueue[Slurm] = SimpleQueue()  # a cluster for each run, so that runs do not disturb each other
        for _ in range(options.jobs):
            free.put(stack.enter_context(cluster(2)))
        if not table.points:
            with held(free) as slurm:
                table.write({"points": list_points(slurm)})
        deaths = choose(table.points, options)
        left = [(number, death) for number, death in enumerate(deaths) if number not in table.rows]
        print(f"{len(left)} of {len(deaths)} deaths are to be played", flush=True)
        end_s = start_s + 60 * options.minutes
        with ThreadPoolExecutor(options.jobs) as pool:
            for _ in pool.map(partial(played, free, table, end_s, options.keep), left):
                pass
    return show(table, len(deaths), time.monotonic() - start_s)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="deaths")
    parser.add_argument("--seed", type=int, default=0, help="which of all possible deaths")
    parser.add_argument("--jobs", type=int, default=3, help="how many runs at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no death after so long")
    parser.add_argument("--only", action="append", default=[], metavar="KIND", help="leave out the others")
    parser.add_argument("--table", type=Path, required=True, help="what came of each death, a JSON object a line")
    parser.add_argument("--keep", type=Path, help="where the run directories in which something is wrong are copied to")
    return parser.parse_args()


class Table:
    """`rows`: what came of each death, by its number. `points`: the places at which a part of a run can die."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        self.points: list[Any] = next((line["points"] for line in lines if "points" in line), [])
        self.rows: dict[int, Mapping[str, Any]] = {line["number"]: line for line in lines if "number" in line}

    def write(self, row: Mapping[str, Any]) -> None:
        with self._lock, self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.points = row.get("points", self.points)
        if "number" in row:
            self.rows[row["number"]] = row


def list_points(slurm: Slurm) -> list[Any]:
    """The points of runs in which nobody dies: the part, and the point."""
    whole = [(where, play(slurm, number, Death(where))) for number, where in enumerate(WHERE, 9000)]
    if bad := [one.wrong for _, one in whole if one.wrong]:
        raise AssertionError(f"a run in which nobody dies: {bad}")
    return [[where, point] for where, one in whole for point in points_of(one.trace)]


def choose(points: Sequence[Any], options: argparse.Namespace) -> list[Death]:
    """As many deaths of each kind as of every other. A number and a seed always give the same death."""
    kinds: dict[str, list[Death]] = defaultdict(list)
    possible = [Death(where, ((point, nth, who),)) for where, (point, nth) in points for who in WHO]
    for death in (*possible, *FROM_OUTSIDE, Death(NOBODY)):
        if not options.only or death.kind in options.only:
            kinds[death.kind].append(death)
    names = sorted(kinds)
    return [
        random.Random(f"{options.seed}-{number}").choice(kinds[names[number % len(names)]])
        for number in range(options.count)
    ]  # fmt: skip


@contextmanager
def held(free: SimpleQueue[Slurm]) -> Iterator[Slurm]:
    slurm = free.get()
    try:
        yield slurm
    finally:
        free.put(slurm)


def played(
    free: SimpleQueue[Slurm], table: Table, end_s: float, keep: Path | None, numbered: tuple[int, Death]
) -> None:  # fmt: skip
    number, death = numbered
    if time.monotonic() > end_s:
        return
    try:
        with held(free) as slurm:
            one = play(slurm, number, death)
            if one.wrong and keep:
                for folder in (slurm.shared / "runs").glob(f"death{number:04}x-*"):
                    shutil.copytree(folder, keep / folder.name, symlinks=True)
    except Exception as error:  # a bug of the campaign must not pass for a clean death
        one = Outcome(died=True, wrong=f"{type(error).__name__}: {error}")
    row = {"number": number, "kind": death.kind, "at": death.at, "after": death.after, **one.to_json()}
    table.write(row)
    print(json.dumps(row), flush=True)


def show(table: Table, count: int, seconds: float) -> int:
    rows = list(table.rows.values())
    for kind in sorted({row["kind"] for row in rows}):
        mine = [row for row in rows if row["kind"] == kind]
        died, worst = sum(row["died"] for row in mine), max(row["seconds"] for row in mine)
        print(f"{kind:<24} {died:>4} deaths in {len(mine):>4} runs; nothing was left after {worst:.1f} s at the latest")
    bad = [row for row in rows if row["wrong"]]
    late = sum(row["seconds"] > BOUND_S and not row.get("recovered") for row in rows)
    proved = sum(row["equal"] and bool(row["proved"]) for row in rows)
    print(
        f"{sum(row['died'] for row in rows)} deaths in {len(rows)} runs, {len(bad)} bad, {late} late; {seconds:.0f} s"
    )
    print(f"{sum(row.get('recovered', False) for row in rows)} needed torchaos recover, because Slurm had killed all")
    print(f"{sum(row['equal'] for row in rows)} runs with equal pids; evidence in {proved} of them")
    for row in bad:
        print(f"BAD {row}")
    return 1 if bad or len(rows) < count else 0


if __name__ == "__main__":
    sys.exit(main())
