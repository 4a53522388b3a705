"""How far two equal jobs without a fault are apart: with deterministic algorithms they must be equal bit for bit.
Without, the verdict must not be *failed*."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from row import need_gpu, need_kernels
from scenario import run

FILE = Path(__file__).with_suffix(".yaml")


def figures(result: dict[str, Any]) -> str:
    cases = [case for case in result.get("cases", []) if case["name"] in ("loss_continuity", "parameter_digest")]
    return f"{result['verdict']} ({'; '.join(case['reason'] for case in cases)})"


def main() -> int:
    if os.environ.get("GPU_CHECK_CPU") != "1":
        need_gpu()
        need_kernels()
    exact = run("twin-noise", file=FILE)
    noisy = run("twin-noise", "job.env.GPU_CHECK_NOISE='1'", file=FILE)
    print(f"deterministic: {figures(exact)}; not deterministic: {figures(noisy)}")
    return int(exact["verdict"] != "passed" or noisy["verdict"] in ("failed", "error"))


if __name__ == "__main__":
    sys.exit(main())
