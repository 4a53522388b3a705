"""Measures the CPU time that a sample of a GPU takes, in the process that asks NVML. Aim: below 2 ms.

Usage: python lab/bench/gpu_samples.py [--seconds 20]

The overlay serves eight simulated GPUs. The CPU time of a short run is taken off, for the start of Python. On a real
GPU, the driver's own work comes on top. It costs the ranks nothing but this CPU time: nothing is asked of them."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

GPUS, SHORT_S = 8, 1.5


def measure(seconds: float, env: dict[str, str]) -> tuple[float, int]:
    """CPU seconds, and samples."""
    from torchaos.harness.host.gpu_devices import READER

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(READER, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(json.dumps({2**30 + gpu: gpu for gpu in range(GPUS)}).encode() + b"\n")
        reader.stdin.flush()
        time.sleep(seconds)
        reader.stdin.close()
        samples = len(reader.stdout.readlines())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, samples


def main() -> int:
    from torchaos.harness.host.native_libraries import NVML

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    env = {**os.environ, "LD_LIBRARY_PATH": str(NVML.path().parent), "TORCHAOS_NVML_REAL": "none"}
    env["TORCHAOS_NVML_GPUS"] = str(GPUS)
    (short_s, few), (long_s, many) = (measure(length, env) for length in (SHORT_S, SHORT_S + seconds))
    each_ms = 1000 * (long_s - short_s) / (many - few)
    print(f"{many - few} samples: {each_ms:.2f} ms of CPU for each GPU and second")
    return 0 if each_ms < 2.0 else 1


if __name__ == "__main__":
    sys.exit(main())
