"""Runs a game day, and checks that the harness does not grow in memory and leaves nothing behind.

    python lab/campaigns/gameday.py [FILE] [--every S] [--out DIR] [-- OPTIONS OF GAMEDAY ...]

FILE: without it, scenarios/gamedays/two-hours.yaml. During the day, the resident memory of the game day's process and
of the current round (each round is a process) is read every S seconds; the table at the end compares the first half of
the day with the second. Processes that name the day's folder in their command or environment, and new network
namespaces, count as left behind. Exit code: that of the game day, or 1 if the memory in the second half is more than a
tenth larger than in the first, or something was left behind.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil

GAMEDAY = Path(__file__).parents[2] / "scenarios" / "gamedays" / "two-hours.yaml"
NAMESPACES = Path("/run/netns")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=GAMEDAY)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks (default 5)")
    parser.add_argument("--out", type=Path, default=Path("torchaos-days"))
    words = [*sys.argv[1:], "--"]
    given = words[words.index("--") + 1 : -1]
    options = parser.parse_args(words[: words.index("--")])
    before = namespaces()
    what = [] if "--resume" in given else [str(options.file), "--out", str(options.out)]
    day = subprocess.Popen([sys.executable, "-m", "torchaos.harness", "gameday", *what, *given])
    samples = watched(day, options.every)
    small = compared(samples)
    left = [*processes_of(str(options.out.absolute())), *sorted(namespaces() - before)]
    print(f"left behind: {', '.join(left) or 'nothing'}")
    return day.returncode or (0 if small and not left else 1)


def watched(day: subprocess.Popen[bytes], every_s: float) -> list[tuple[float, int, int]]:
    """Samples until the game day has ended: (seconds since the start, bytes of the game day's process, bytes of the
    round's process)."""
    begun, samples = time.monotonic(), list[tuple[float, int, int]]()
    process = psutil.Process(day.pid)
    while True:
        try:
            day.wait(every_s)
            return samples
        except subprocess.TimeoutExpired:
            parts = [resident(child) for child in (process, *process.children())]
            samples.append((time.monotonic() - begun, parts[0], max(parts[1:], default=0)))


def resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def compared(samples: list[tuple[float, int, int]]) -> bool:
    """Prints both halves. Returns whether the second is at most a tenth larger."""
    half = samples[-1][0] / 2 if samples else 0.0
    print("| MiB | first half, median | largest | second half, median | largest |")
    print("|---|---|---|---|---|")
    small = bool(samples)
    for name, column in (("the game day's process", 1), ("the round's process", 2)):
        first, second = (
            [s[column] for s in samples if s[column] and (s[0] <= half) == early] for early in (True, False)
        )
        if not first or not second:
            small = False
            continue
        cells = (median(first), max(first), median(second), max(second))
        print(f"| {name} | {' | '.join(f'{cell / 2**20:.1f}' for cell in cells)} |")
        small = small and median(second) <= 1.1 * median(first) and max(second) <= 1.1 * max(first)
    print(f"{len(samples)} looks in {samples[-1][0] if samples else 0.0:.0f} s")
    return small


def processes_of(folder: str) -> list[str]:
    """Processes that name the folder, except this process and its ancestors."""
    names = re.compile(rf"{re.escape(folder)}(?![^/:\s])")
    mine = {psutil.Process().pid, *(ancestor.pid for ancestor in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if process.pid not in mine and any(names.search(word) for word in words):
            found.append(f"process {process.pid} ({process.name()})")
    return found


def namespaces() -> set[str]:
    return {path.name for path in NAMESPACES.iterdir()} if NAMESPACES.exists() else set()


if __name__ == "__main__":
    sys.exit(main())
