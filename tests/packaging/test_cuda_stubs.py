"""The stand-ins for CUDA libraries, with which a CUDA build of torch runs on the CPU in `make test-agent-versions`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import REPOSITORY, run

pytestmark = pytest.mark.skipif(not shutil.which("gcc") or not shutil.which("readelf"), reason="needs gcc and readelf")
TORCH = "int cuToy(void); const char *cuToyGetErrorString(void); int ask(void) { return cuToy(); }"
TOY = "int cuToy(void) { return 0; } const char *cuToyGetErrorString(void) { return 0; }"


def compiled(folder: Path, name: str, text: str, *options: str) -> None:
    (folder / "source.c").write_text(text)
    run("gcc", "-shared", "-fPIC", "source.c", "-o", name, f"-Wl,-soname,{name}", *options, cwd=folder)
    (folder / "source.c").unlink()


def ask(folder: Path) -> str:
    """What the library answers, in a process of its own: a library of one SONAME is loaded once per process."""
    program = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ask())"
    command = [sys.executable, "-c", program, str(folder / "libtorch_toy.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


@pytest.mark.parametrize("version", ["", "libcutoy.so.1 { global: *; };"], ids=["plain", "versioned"])
def test_a_missing_library_is_stood_in_for(tmp_path: Path, version: str) -> None:
    """A library that could not be loaded for want of a CUDA library loads, and is told that there is no device."""
    (tmp_path / "map").write_text(version)
    compiled(tmp_path, "libcutoy.so.1", TOY, *(["-Wl,--version-script=map"] if version else []))
    compiled(tmp_path, "libtorch_toy.so", TORCH, "-L.", "-l:libcutoy.so.1", "-Wl,-rpath,$ORIGIN")
    (tmp_path / "libcutoy.so.1").unlink()
    assert "libcutoy.so.1: cannot open shared object file" in ask(tmp_path)

    run(sys.executable, REPOSITORY / "ci/cuda_stubs.py", tmp_path, cwd=tmp_path)
    assert ask(tmp_path) == "100"


def test_a_library_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """A real library is never replaced."""
    compiled(tmp_path, "libcutoy.so.1", TOY)
    compiled(tmp_path, "libtorch_toy.so", TORCH, "-L.", "-l:libcutoy.so.1", "-Wl,-rpath,$ORIGIN")
    run(sys.executable, REPOSITORY / "ci/cuda_stubs.py", tmp_path, cwd=tmp_path)
    assert ask(tmp_path) == "0"
