"""How far two equal jobs without a fault are apart: with deterministic algorithms they must be equal bit for bit.
Without, the verdict must not be *failed*."""

from __future__ import annotations

import os
import sys
from typing import Any

from row import need_gpu, need_kernels
from scenario import run


def figures(result: dict[str, Any]) -> str:
    cases = [case for case in result.get("cases", []) if case["name"] in ("loss_continuity", "parameter_digest")]
    return f"{result['verdict']} ({'; '.join(case['reason'] for case in cases)})"


def main() -> int:
    if os.environ.get("GPU_CHECK_CPU") != "1":
        need_gpu()
        need_kernels()
    exact = run("twin_noise")
    told, right = [f"deterministic: {figures(exact)}"], exact["verdict"] == "passed"
    if os.environ.get("GPU_CHECK_CPU") != "1":  # whose algorithms are deterministic in any case
        noisy = run("twin_noise", "job.env.GPU_CHECK_NOISE='1'")
        told.append(f"not deterministic: {figures(noisy)}")
        right &= noisy["verdict"] not in ("failed", "error")
    print("; ".join(told))
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
