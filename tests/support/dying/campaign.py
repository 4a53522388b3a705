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
from contextlib import suppress
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
    lock = threading.Lock()

    def work(worker: Worker) -> None:
        with suppress(Empty):
            while time.monotonic() < end_s:
                death = waiting.get_nowait()
                told = worker.die(death)
                with lock:
                    done.append((death, told))
                    on_told(death, told)
        worker.close()

    with tempfile.TemporaryDirectory(prefix="dying-", ignore_cleanup_errors=True) as folder:
        threads = [threading.Thread(target=work, args=(Worker(Path(folder, str(n)), keep),)) for n in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return done


class Worker:
    """A process that plays one death after another, in namespaces of its own where it can have them."""

    def __init__(self, folder: Path, keep: Path) -> None:
        self._folder, self._keep, self._isolated = folder, keep.absolute(), alone()
        self._keep.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[str] | None = None

    def die(self, death: Death) -> Told:
        """A worker that ends over it is a leak as well: nobody has seen that the machine is clean."""
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([death.family, death.at]) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if line.endswith("\n"):
            return Told(**json.loads(line))
        self.close()
        return Told(died=False, leaks=[f"the campaign's worker ended with exit code {process.returncode}"])

    def close(self) -> None:
        if self._process:
            with suppress(BrokenPipeError), self._process:
                pass
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._folder.mkdir(exist_ok=True)
        inside, said = (NAMESPACES, ("alone",)) if self._isolated else ((), ())
        command = [*inside, sys.executable, str(WORKER), str(self._folder), *said]
        env = {**os.environ, "DYING_KEEP": str(self._keep)}
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
    chosen = pools.pop("journal", [])[: math.ceil(0.6 * count)]
    while len(chosen) < count and any(pools.values()):
        for pool in pools.values():
            if pool and len(chosen) < count:
                chosen.append(pool.pop())
    draw.shuffle(chosen)
    return chosen
