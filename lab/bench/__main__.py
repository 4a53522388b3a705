"""Runs all benchmarks with short settings, in some minutes: `make bench`. The --help of each says what it compares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHORT = {
    "agent_step.py": ["--ms", "1", "10", "--seconds", "10", "--pairs", "10"],
    "latency.py": ["--firings", "300", "--freezes", "30"],
    "own_time.py": ["--pairs", "3"],
    "exactness.py": ["--runs", "6"],
    "gpu_samples.py": [],
    "collect.py": ["--pairs", "10"],
    "controller.py": ["--ranks", "2,64"],
    "judge.py": [],
    "looks.py": ["--hours", "2", "--round", "0.5"],
    "nvml_xid.py": [],
    "start.py": ["--rounds", "10"],
    "verify.py": ["--gb", "1", "--repeats", "3", "--pairs", "2"],
}


def main() -> int:
    worst = 0
    for script, options in SHORT.items():
        print(f"\n== {script} {' '.join(options)}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, Path(__file__).with_name(script), *options]).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
