"""Chooses which deaths are played, and by which worker. The points of a family are the points that its run passes if
nothing dies. A stratum is a way to die at some of them."""

from __future__ import annotations

import compileall
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

import torchaos.assertions
import torchaos.harness
import torchaos.injectors
from dying.scene import Aftermath, At, Death

WORKER = Path(__file__).with_name("worker.py")
NAMESPACES = ("unshare", "--pid", "--fork", "--mount", "--net", "--mount-proc", "--kill-child")
OnDeath = Callable[[Death, Aftermath], None]
Point = tuple[str, int]


def compile_all() -> None:
    """Compiles all modules once: processes that may be killed must not write byte code."""
    packages = (torchaos.harness, torchaos.injectors, torchaos.assertions)
    for folder in (*(str(path) for package in packages for path in package.__path__), str(Path(__file__).parent)):
        compileall.compile_dir(folder, quiet=2)


def alone() -> bool:
    """Whether this machine permits namespaces of our own."""
    try:
        return subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def play(
    deaths: Sequence[Death], workers: int, keep: Path, on_death: OnDeath = lambda *_: None, end_s: float = math.inf
) -> list[tuple[Death, Aftermath]]:
    """Plays all deaths, `workers` at a time; none is begun after `end_s` (seconds of CLOCK_MONOTONIC). If a death has
    leaks, what it left is copied to `keep`."""
    waiting: SimpleQueue[Death] = SimpleQueue()
    for death in deaths:
        waiting.put(death)
    done: list[tuple[Death, Aftermath]] = []
    lock = threading.Lock()

    def work(worker: Worker) -> None:
        with suppress(Empty):
            while time.monotonic() < end_s:
                death = waiting.get_nowait()
                aftermath = worker.die(death)
                with lock:
                    done.append((death, aftermath))
                    on_death(death, aftermath)
        worker.close()

    with tempfile.TemporaryDirectory(prefix="dying-", ignore_cleanup_errors=True) as folder:
        threads = [threading.Thread(target=work, args=(Worker(Path(folder, str(n)), keep),)) for n in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return done


class Worker:
    """A process that plays one death after another, in its own namespaces if possible."""

    def __init__(self, folder: Path, keep: Path) -> None:
        self._folder, self._keep, self._isolated = folder, keep.absolute(), alone()
        self._keep.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[str] | None = None

    def die(self, death: Death) -> Aftermath:
        """Plays a death. If the worker ends, that is a leak too, because then nothing has checked the machine."""
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([death.family, death.at]) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if line.endswith("\n"):
            return Aftermath(**json.loads(line))
        self.close()
        return Aftermath(died=False, leaks=[f"the campaign's worker ended with exit code {process.returncode}"])

    def close(self) -> None:
        if self._process:
            with suppress(BrokenPipeError), self._process:
                pass
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._folder.mkdir(exist_ok=True)
        inside, flags = (NAMESPACES, ("alone",)) if self._isolated else ((), ())
        command = [*inside, sys.executable, str(WORKER), str(self._folder), *flags]
        env = {**os.environ, "DYING_KEEP": str(self._keep)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def points_of(trace: Sequence[str]) -> list[Point]:
    """The points of a trace (`ROLE POINT` and the nth time), in the order in which they were passed first."""
    points = [(line.rpartition(" ")[0], int(line.rpartition(" ")[2])) for line in trace if not line.startswith("died ")]
    return list(dict.fromkeys(points))


def strata(family: str, points: Sequence[Point]) -> Iterator[tuple[str, list[Death]]]:
    """Every way to die, by kind. The first kind is the death of the harness after each kind of event was written."""

    def deaths(chosen: Sequence[Point], *who: str) -> list[Death]:
        return [Death(family, ((point, nth, who),)) for point, nth in chosen]

    harness = [point for point in points if point[0].startswith("harness")]
    reaper = [point for point in points if point[0].startswith("reaper")]
    events = [point for point in harness if point[0].startswith("harness after event")]
    firsts = [point for point in events if point[1] == 1]
    started = next((number for number, point in enumerate(harness) if "start reaper" in point[0]), 0)
    launched = next((number for number, point in enumerate(harness) if "job.started" in point[0]), len(harness))
    yield "journal", deaths(firsts, "harness")
    yield "harness", deaths([point for point in harness if point not in firsts], "harness")
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
    """The points that the reaper passes for the first time when it heals what a dead harness left."""
    return [
        point
        for point in points
        if point[1] == 1 and any(word in point[0] for word in ("restore", "look", "rolled", "verified"))
    ]


def choose(ways: Sequence[tuple[str, list[Death]]], count: int, draw: random.Random) -> list[Death]:
    """Deaths of the journal points, at most three in five. The rest comes from the other strata in equal parts."""
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
