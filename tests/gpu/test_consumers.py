"""Programs by other people that call NVML, with the overlay."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ORDERS = """gpus = 2
gpu0.ecc.volatile.uncorrected += 3
gpu0.temperature = 95
gpu1.temperature = 41
"""


def test_nvitop_shows_what_is_ordered(overlay: Path, tmp_path: Path) -> None:
    """A monitor shows two simulated GPUs, one of them too hot and with errors of ECC."""
    pytest.importorskip("nvitop", reason="nvitop is not installed")
    (tmp_path / "orders.nvml").write_text(ORDERS)
    env = {
        **os.environ, "LD_LIBRARY_PATH": str(overlay.parent), "TORCHAOS_NVML_REAL": "none",
        "TORCHAOS_NVML_CONTROL": str(tmp_path), "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    command = [sys.executable, "-m", "nvitop", "--once", "--no-unicode"]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True).stdout
    lines = [line.split("|") for line in shown.splitlines()]
    gpus = [cells for cells in lines if len(cells) == 5 and cells[1].split()[:1] in (["0"], ["1"])]
    below = [after for before, after in pairwise(lines) if before in gpus]
    assert [cells[3].split()[-1] for cells in gpus] == ["3", "0"], shown
    assert ["95C" in cells[1] for cells in below] == [True, False], shown
    assert ["41C" in cells[1] for cells in below] == [False, True], shown
