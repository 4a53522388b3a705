"""Which deaths there are, which of them are died, and who does it.

The points of a family are those that a run of it passes when nobody dies. A stratum is a way to die at some of them.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from dying.scene import At, Death, Told

WORKER = Path(__file__).with_name("worker.py")
NAMESPACES = ("unshare", "--pid", "--fork", "--mount", "--net", "--mount-proc", "--kill-child")
OnTold = Callable[[Death, Told], None]
Point = tuple[str, int]


def alone() -> bool:
    """Whether this machine lets us have namespaces of our own."""
    try:
        return subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def play(
    deaths: Sequence[Death], workers: int, keep: Path, on_told: OnTold = lambda *_: None, end_s: float = math.inf
) -> list[tuple[Death, Told]]:
    """All of them, `workers` at a time; none is begun after `end_s` (CLOCK_MONOTONIC). What a leaking one left is
    copied to `keep`."""
    waiting: SimpleQueue[Death] = SimpleQueue()
    for death in deaths:
        waiting.put(death)
    done: list[tuple[Death, Told]] = []
    problems: list[Exception] = []
    lock, isolated = threading.Lock(), alone()

    def work(folder: Path) -> None:
        try:
            with _worker(folder, isolated, keep) as process:
                assert process.stdin
                assert process.stdout
                while True:
                    if waiting.empty() or time.monotonic() > end_s:
                        process.stdin.close()
                        return
                    try:
                        death = waiting.get_nowait()
                    except Empty:
                        continue
                    process.stdin.write(json.dumps([death.family, death.at]) + "\n")
                    process.stdin.flush()
                    told = Told(**json.loads(process.stdout.readline()))
                    with lock:
                        done.append((death, told))
                        on_told(death, told)
        except Exception as error:
            problems.append(error)

    with tempfile.TemporaryDirectory(prefix="dying-") as folder:
        places = [Path(folder, str(number)) for number in range(workers)]
        threads = [threading.Thread(target=work, args=(place,)) for place in places]
        for place, thread in zip(places, threads, strict=True):
            place.mkdir()
            thread.start()
        for thread in threads:
            thread.join()
    if problems:
        raise problems[0]
    return done


def _worker(folder: Path, isolated: bool, keep: Path) -> subprocess.Popen[str]:
    keep.mkdir(parents=True, exist_ok=True)
    command = [
        *(NAMESPACES if isolated else ()),
        sys.executable,
        str(WORKER),
        str(folder),
        *(["alone"] if isolated else []),
    ]
    env = {**os.environ, "DYING_KEEP": str(keep.absolute())}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def points_of(trace: Sequence[str]) -> list[Point]:
    """In the order in which they were passed first: `ROLE POINT`, nth time."""
    found = [(line.rpartition(" ")[0], int(line.rpartition(" ")[2])) for line in trace if not line.startswith("died ")]
    return list(dict.fromkeys(found))


def strata(family: str, points: Sequence[Point]) -> Iterator[tuple[str, list[Death]]]:
    """Every way to die, by kind; the first is death of the harness at each kind of event, after it is written."""

    def deaths(chosen: Sequence[Point], *who: str) -> list[Death]:
        return [Death(family, ((point, nth, who),)) for point, nth in chosen]

    harness = [one for one in points if one[0].startswith("harness")]
    reaper = [one for one in points if one[0].startswith("reaper")]
    events = [one for one in harness if one[0].startswith("harness after event")]
    firsts = [one for one in events if one[1] == 1]
    started = next((number for number, one in enumerate(harness) if "start reaper" in one[0]), 0)
    launched = next((number for number, one in enumerate(harness) if "job.started" in one[0]), len(harness))
    yield "journal", deaths(firsts, "harness")
    yield "harness", deaths([one for one in harness if one not in firsts], "harness")
    yield "reaper", deaths(reaper, "reaper") + deaths(harness[started + 1 :], "reaper")
    yield "both", deaths(reaper, "harness", "reaper") + deaths(harness[started + 1 :], "harness", "reaper")
    yield "job", deaths(harness[launched:], "job") + deaths(harness[launched:], "harness", "job")
    yield (
        "then",
        [
            Death(family, (first, second))
            for first in _when(firsts, "harness")
            for second in _when(_healing(reaper), "reaper")
        ],
    )


def _when(points: Sequence[Point], who: str) -> list[At]:
    return [(point, nth, (who,)) for point, nth in points]


def _healing(points: Sequence[Point]) -> list[Point]:
    """Points that the reaper passes for the first time when it heals what a dead harness left."""
    return [
        one
        for one in points
        if one[1] == 1 and any(word in one[0] for word in ("restore", "look", "rolled", "verified"))
    ]


def choose(ways: Sequence[tuple[str, list[Death]]], count: int, draw: random.Random) -> list[Death]:
    """The journal points, as long as they are not more than three in five; the rest goes to the other strata, equal
    parts of each."""
    pools: dict[str, list[Death]] = {}
    for name, deaths in ways:
        pools.setdefault(name, []).extend(deaths)
    for pool in pools.values():
        draw.shuffle(pool)
    chosen = pools.pop("journal")[: math.ceil(0.6 * count)]
    while len(chosen) < count and any(pools.values()):
        for pool in pools.values():
            if pool and len(chosen) < count:
                chosen.append(pool.pop())
    draw.shuffle(chosen)
    return chosen
