"""What lies in a checkpoint folder, tensor by tensor. Reading takes the job's torch, so another process does it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

# The job's Python may have no torchaos, and its path must not get our folders: load this one under a private name.
_START = """
import importlib.util, pathlib, sys
folder, root = sys.argv[1:]
spec = importlib.util.spec_from_file_location("_torchaos_checkpoints", folder + "/__init__.py",
                                              submodule_search_locations=[folder])
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
from _torchaos_checkpoints.reader import main
sys.exit(main(pathlib.Path(root)))
"""


def take(path: Path, python: str, timeout_s: float = 300.0) -> dict[str, Any]:
    """The inventory of all checkpoints under `path`, read by the interpreter `python`, which has the job's torch.

    {"root", "checkpoints": [fields of `reader.Checkpoint`], "problem": why this is not all, or None}. Raises nothing.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    problem, output = None, ""
    try:
        done = subprocess.run(
            [python, "-c", _START, str(Path(__file__).parent), str(path)],
            capture_output=True,
            timeout=timeout_s,
            env=environment,
        )
        output = done.stdout.decode()
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            problem = said[-1] if said else f"the reader ended with {done.returncode}"
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode()
        problem = f"not read within {timeout_s:g} s"
    except OSError as error:
        problem = f"{python}: {error.strerror}"
    whole = [line for line in output.splitlines(keepends=True) if line.endswith("\n")]  # the last may be cut off
    return {"root": str(path), "checkpoints": [json.loads(line) for line in whole], "problem": problem}
