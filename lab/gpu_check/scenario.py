"""Runs a ready scenario with job.py in place of gpt_ddp.py, and says what the verdict was. It passes if the scenario
does.

    scenario.py NAME [KEY=VALUE ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from row import (
    KEEP,
    NOT_POSSIBLE,
    backend,
    driver_library,
    need_gpu,
    need_kernels,
    need_nccl_to_read,
    need_two_ranks_with_nccl,
)

JOB = Path(__file__).with_name("job.py")


def run(name: str, *overrides: str, file: Path | None = None) -> dict[str, Any]:
    """The result, as in result.json. The run directory stays in the folder `runs`. `file`: a scenario that is not among
    the ready ones."""
    source = file or _ready(name)
    report = KEEP / "scenario.json"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "torchaos.harness", "run", str(source), "--out", str(KEEP / "runs")]
    given = [with_our_job(source), *overrides]
    env = {**os.environ, "GPU_CHECK_BACKEND": backend()}
    subprocess.run(
        [*words, "--json", str(report), *(word for one in given for word in ("--set", one))], env=env, check=False
    )
    if not report.exists():
        return {"verdict": "error", "reason": "torchaos wrote no result", "recoveries": []}
    found: dict[str, Any] = json.loads(report.read_text())["results"][0]
    return found


def _ready(name: str) -> Path:
    return Path(str(files("torchaos.scenarios") / f"{name}.yaml"))


def with_our_job(source: Path) -> str:
    """The value of --set that puts job.py in the place of gpt_ddp.py."""
    command = yaml.safe_load(source.read_text())["job"]["command"].replace("{jobs}/gpt_ddp.py", str(JOB))
    return f"job.command={json.dumps(command)}"  # quoted: {python} at its beginning would be a mapping


def main(name: str, overrides: list[str]) -> int:
    if os.environ.get("GPU_CHECK_CPU") != "1":
        need_gpu()
        need_kernels()
        import torch

        if name == "gpu/xid-79":
            overrides = [*(f"job.env.{key}={json.dumps(path)}" for key, path in driver_library().items()), *overrides]
            if torch.cuda.device_count() < 3:  # without a spare GPU, torchrun restarts the ranks when the GPU is well
                command = with_our_job(_ready(name)).replace("--max-restarts 0", "--max-restarts 3")
                well = ["faults.0.for=4s", "assert.0.health_reaction.excluded=false", command]
                overrides = [*well, *overrides]
            if torch.cuda.device_count() == 1:  # rank 1 has no GPU of its own
                overrides = ["faults.0.target.rank=0", "job.env.CUDA_VISIBLE_DEVICES='0'", *overrides]
    if "nccl" in name:
        need_two_ranks_with_nccl()
        need_nccl_to_read("NVTX_INJECTION64_PATH")
    result = run(name, *overrides)
    if result["verdict"] == "inconclusive" and "needs" in result["reason"]:
        print(result["reason"])
        return NOT_POSSIBLE
    measured = {
        f"{case['name']} {key}": value
        for case in result.get("cases", []) for key, value in case["measured"].items() if key in case["seconds"]
    }  # fmt: skip
    figures = ", ".join(f"{key} {value:.2f} s" for key, value in measured.items() if isinstance(value, float))
    print(f"{result['verdict']}: {result['reason']}{f' ({figures})' if figures else ''}")
    return int(result["verdict"] != "passed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
