"""The overlay compiled for the tests, a stand-in for the driver's library, and a process that calls NVML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.host.native_libraries import NVML, compiler

from .stand_in import SOURCE

Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libnvidia-ml.so.1, with all warnings as errors."""
    program = compiler()
    if program is None:
        pytest.skip("no C compiler here: apt-get install gcc")
    return NVML.build(tmp_path_factory.mktemp("nvml"), program, "-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with every symbol of the driver's, that notes each call and returns a number of its own."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(SOURCE)
    made = folder / "libdriver.so"
    program = compiler()
    if program is None:
        pytest.skip("no C compiler here: apt-get install gcc")
    subprocess.run([program, "-shared", "-fPIC", "-o", str(made), str(folder / "driver.c")], check=True)
    return made


@pytest.fixture
def ask(overlay: Path, tmp_path: Path) -> Ask:
    """Runs Python code in a process that has the overlay; what it leaves in `answer` comes back through JSON."""

    def run(code: str, orders: str | None = "", real: Path | None = None, env: Mapping[str, str] | None = None) -> Any:
        if orders is not None:
            (tmp_path / "orders.nvml").write_text(orders)
        environ = {
            **os.environ,
            "LD_LIBRARY_PATH": str(overlay.parent),
            "TORCHAOS_NVML_REAL": str(real or "none"),
            **({"TORCHAOS_NVML_CONTROL": str(tmp_path)} if orders is not None else {}),
            **(env or {}),
        }
        script = f"import json\nfolder = {str(tmp_path)!r}\n{code}\nprint(json.dumps(answer))"
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr}"
        return json.loads(done.stdout)

    return run
