"""Measures the start-up time of the command line and the pytest plugin. Aims: 150 ms for help and completion, 30 ms for
pytest.

In each round every command runs once, in turn: `python -c pass`, `torchaos --help`, the completion of a command, and
pytest on one empty test without and with the plugin. Printed are medians of wall-clock time and processor time (user
and system), and for pytest the mean of the rounds' differences with its 95 % interval (Student's t).

Usage: python lab/bench/start.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from intervals import interval

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_empty.py"]
COMPLETION = {"_TORCHAOS_COMPLETE": "bash_complete", "COMP_WORDS": "torchaos re", "COMP_CWORD": "1"}
ROWS: dict[str, tuple[list[str], dict[str, str]]] = {
    "python -c pass": ([sys.executable, "-c", "pass"], {}),
    "torchaos --help": (["torchaos", "--help"], {}),
    "completion": (["torchaos"], COMPLETION),
    "pytest without": ([*PYTEST, "-p", "no:torchaos"], {}),
    "pytest with": (PYTEST, {}),
}


def measured(command: list[str], env: dict[str, str], folder: str) -> tuple[float, float]:
    """Wall-clock and processor time of a command in milliseconds."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, env={**os.environ, **env}, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * wall, 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_empty.py").write_text("def test_empty():\n    pass\n")
        for _ in range(given.rounds):
            for name, (command, env) in ROWS.items():
                times[name].append(measured(command, env, folder))
    print(f"{'':<16}  {'wall':>7}  {'processor':>9}")
    for name, found in times.items():
        wall, used = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:<16}  {wall:4.0f} ms  {used:6.0f} ms")
    pairs = zip(times["pytest with"], times["pytest without"], strict=True)
    mean, low, high = interval([with_[1] - without[1] for with_, without in pairs])
    print(f"the plugin: {mean:+.1f} ms of processor time ({low:+.1f} to {high:+.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
