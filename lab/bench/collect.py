"""Measures the cost of the pytest plugin for a project that does not use it: `pytest --collect-only`. Aim: under 30 ms.

The same project (200 tests in 20 files, and 20 YAML files that are no scenarios) is collected with the plugin and
without it (`-p no:torchaos`), in turn, in separate processes. Each pair of neighbours gives one difference; printed are
the median and the mean of the differences, with its 95 % interval.

Usage: python lab/bench/collect.py [--pairs 20]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from intervals import interval


def project(folder: Path) -> None:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for number in range(20):
        tests = "\n".join(f"def test_{place}(): pass" for place in range(10))
        (folder / f"test_{number}.py").write_text(tests + "\n")
        (folder / f"values-{number}.yaml").write_text("replicas: 3\nscenario: of another tool\n")


def collect(folder: Path, *options: str) -> float:
    """Processor seconds of a collection; a busy machine disturbs them less than wall-clock time."""
    before = os.times()
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "200 tests collected" in done.stdout, done.stdout + done.stderr
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, choices=range(2, 201), metavar="2..200")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project(folder)
        collect(folder), collect(folder, "-p", "no:torchaos")  # makes the byte code
        began = time.monotonic()
        pairs: list[tuple[float, float]] = []
        for number in range(given.pairs):
            order = [("-p", "no:torchaos"), ()] if number % 2 else [(), ("-p", "no:torchaos")]
            took = {bool(options): collect(folder, *options) for options in order}
            pairs.append((took[True], took[False]))
    extra = [with_ - without for without, with_ in pairs]
    mean, low, high = interval(extra)
    print(f"{given.pairs} pairs in {time.monotonic() - began:.0f} s, processor time of pytest --collect-only")
    print(f"without the plugin: median {1000 * statistics.median(a for a, _ in pairs):.0f} ms")
    print(f"with it: median {1000 * statistics.median(extra):+.1f} ms, mean {1000 * mean:+.1f} ms "
          f"[{1000 * low:+.1f}, {1000 * high:+.1f}]")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
