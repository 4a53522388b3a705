"""Runs a scenario, a ready one or one of this folder, with job.py in place of gpt_ddp.py, and says what the verdict
was. It passes if the scenario does.

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
    gpus,
    need_gpu,
    need_kernels,
    need_nccl_to_read,
    need_two_ranks_with_nccl,
)

JOB = Path(__file__).with_name("job.py")
# Each scenario that is compared with its twin has these, too. So all need the same of the twin, and it is made once.
SHARED = ("checkpoint_integrity", "loss_continuity", "parameter_digest", "sample_accounting")


def run(name: str, *overrides: str) -> dict[str, Any]:
    """The result, as in result.json. The run directory stays in the folder `runs`."""
    source = found(name)
    report = KEEP / "scenario.json"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "torchaos.harness", "run", str(source), "--out", str(KEEP / "runs")]
    given = [with_our_job(source), *for_one_twin(source), *overrides]
    env = {**os.environ, "GPU_CHECK_BACKEND": backend()}
    subprocess.run(
        [*words, "--json", str(report), *(word for one in given for word in ("--set", one))], env=env, check=False
    )
    if not report.exists():
        return {"verdict": "error", "reason": "torchaos wrote no result", "recoveries": []}
    result: dict[str, Any] = json.loads(report.read_text())["results"][0]
    return result


def found(name: str) -> Path:
    """The file of a scenario."""
    return Path(str(files("torchaos.scenarios") / f"{name}.yaml")) if "/" in name else JOB.with_name(f"{name}.yaml")


def for_one_twin(source: Path) -> list[str]:
    """The values of --set by which scenarios have one twin."""
    scenario = yaml.safe_load(source.read_text())
    names = [one if isinstance(one, str) else next(iter(one)) for one in scenario["assert"]]
    if "loss_continuity" not in names:
        return []
    asked = [*scenario["assert"], *(name for name in SHARED if name not in names)]
    return [f"job.cwd={json.dumps(str(KEEP.absolute()))}", f"assert={json.dumps(asked)}"]


def with_our_job(source: Path) -> str:
    """The value of --set that puts job.py in the place of gpt_ddp.py, with enough restarts for all scenarios. With
    the address, the name of a machine without a network need not be known to it."""
    command = yaml.safe_load(source.read_text())["job"]["command"].replace("{jobs}/gpt_ddp.py", str(JOB))
    command = command.replace("--max-restarts 3", "--max-restarts 4")
    command = command.replace("--standalone", "--standalone --local-addr 127.0.0.1")
    return f"job.command={json.dumps(command)}"  # quoted: {python} at its beginning would be a mapping


def main(name: str, overrides: list[str]) -> int:
    if os.environ.get("GPU_CHECK_CPU") != "1":
        need_gpu()
        need_kernels()
        if name == "gpu/xid-79":
            overrides = [*(f"job.env.{key}={json.dumps(path)}" for key, path in driver_library().items()), *overrides]
            if gpus() < 3:  # without a spare GPU, torchrun restarts the ranks when the GPU is well
                command = with_our_job(found(name)).replace("--max-restarts 0", "--max-restarts 3")
                well = ["faults.0.for=4s", "assert.0.health_reaction.excluded=false", command]
                overrides = [*well, *overrides]
            if gpus() == 1:  # rank 1 has no GPU of its own
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
