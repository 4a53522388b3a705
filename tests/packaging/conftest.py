"""A wheel of this checkout, and environments that have torchaos but not the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "*.so.*", "__pycache__", "torchaos-runs")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run `command` to its end and return what it printed; fail the test with that text when it failed."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(map(str, command))} exited {done.returncode}:\n{text}"
    return text


def environment(folder: Path, install: Sequence[str | Path]) -> Path:
    """Make a virtual environment with torchaos installed by `pip install INSTALL`; return its Python.

    What torchaos and the tests depend on is borrowed from the running environment by a .pth file, whose own .pth files
    (that of an editable torchaos, above all) Python does not read.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin/python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder.parent).strip()
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # Without --ignore-installed, pip would take the borrowed torchaos for an old one of this environment.
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    run(*PIP, "--python", python, "install", *offline, *install, cwd=folder.parent)
    return python


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository as a fresh clone has it: no build folder that could add old files to a wheel."""
    return shutil.copytree(REPOSITORY, tmp_path_factory.mktemp("checkout") / "torchaos", ignore=LEFT_OUT)


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of it, made where an older build has left a module that is gone."""
    for name in ("lib", f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"):
        stale = checkout / "build" / name / "torchaos" / "harness" / "gone.py"
        stale.parent.mkdir(parents=True)
        stale.touch()
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, checkout, cwd=folder)
    return next(folder.glob("torchaos-*.whl"))


@pytest.fixture(scope="session")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel in it."""
    return environment(tmp_path_factory.mktemp("from-wheel") / "venv", [wheel])


@pytest.fixture(scope="session")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with an editable install of the copied checkout."""
    return environment(tmp_path_factory.mktemp("editable") / "venv", ["--editable", checkout])
