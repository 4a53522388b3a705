"""Runs the reference job as it is, save that one part of the checkpoint is written but never put back."""

import runpy
import sys
from pathlib import Path

JOBS = Path(__file__).parents[3] / "scenarios" / "jobs"


def run_without(part: str) -> None:
    sys.path.insert(0, str(JOBS))
    from fault_tolerance import Checkpoints

    restore = Checkpoints.restore
    Checkpoints.restore = lambda self, parts: restore(self, {name: parts[name] for name in parts if name != part})
    runpy.run_path(str(JOBS / "gpt_ddp.py"), run_name="__main__")
