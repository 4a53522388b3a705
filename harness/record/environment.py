"""Records the environment of a run: interpreters, versions, the machine. It may explain a difference between two
runs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import Plan


def resolve_program(name: str, cwd: Path) -> str:
    """The absolute path of a command's program. Searches like a shell, and then beside torchaos's own Python (for a
    virtual environment that was not activated). Raises UsageError if it is not found."""
    found = shutil.which(name if "/" not in name else str(cwd / name)) or shutil.which(
        name, path=str(Path(sys.executable).parent)
    )
    if found is None:
        raise UsageError(
            f"{name}: no such program on the PATH or beside {sys.executable}; give its full path in job.command"
        )
    return os.path.abspath(found)


def job_python(command: Sequence[str]) -> str:
    """The Python interpreter of the job: the program itself, or the interpreter in the program's first line, or
    torchaos's own."""
    program = Path(command[0])
    if program.name.startswith("python"):
        return str(program)
    try:
        with open(program, "rb") as file:
            first = file.readline(512)
    except OSError:
        return sys.executable
    named = first[2:].split()[:1] if first.startswith(b"#!") else []
    path = named[0].decode(errors="replace") if named else ""
    return path if "python" in Path(path).name and os.access(path, os.X_OK) else sys.executable


def installed(python: str) -> dict[str, str]:
    """Name and version of every distribution that is installed for this interpreter."""
    return {name: version for name, version, _folder in _distributions(python)}


def editable(python: str) -> list[Path]:
    """The folders of editable installations (`pip install -e`): their sources may change while the version does not."""
    return [Path(folder) for name, _version, folder in _distributions(python) if folder and name != "torchaos"]


@lru_cache
def importable(python: str) -> frozenset[str]:
    """The names of the modules that are installed for this interpreter, with those of Python itself."""
    code = """
import json, pkgutil, sys
paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
print(json.dumps([*sys.stdlib_module_names, *(found.name for found in pkgutil.iter_modules(paths))]))
"""
    return frozenset(map(str, _asked(python, code)))


@lru_cache
def _distributions(python: str) -> list[tuple[str, str, str]]:
    code = """
import importlib.metadata as m, json
def folder(d):
    at = json.loads(d.read_text("direct_url.json") or "{}")
    return at["url"].partition("file://")[2] if at.get("dir_info", {}).get("editable") else ""
print(json.dumps([(d.metadata["Name"], d.version, folder(d)) for d in m.distributions() if d.metadata["Name"]]))
"""
    return [(str(name), str(version), str(folder)) for name, version, folder in _asked(python, code)]


def _asked(python: str, code: str) -> list[Any]:
    """Runs `code` in the interpreter, and returns the list that it prints as JSON. Empty if the interpreter can't be
    run."""
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        return list(json.loads(done.stdout))
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return []


@lru_cache
def ranks_per_node(python: str, word: str, env: frozenset[tuple[str, str]]) -> int | None:
    """The number of ranks that torchrun starts for `--nproc-per-node gpu`, `cpu` or `auto` on this machine, according
    to the job's own torch. None if it refuses the word, or can't be asked."""
    code = "import sys, torch.distributed.run as r; print(r.determine_local_world_size(sys.argv[1]))"
    try:
        done = subprocess.run(
            [python, "-c", code, word], capture_output=True, text=True, timeout=120, check=False, env=dict(env)
        )  # fmt: skip
        return int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def describe(plan: Plan) -> dict[str, Any]:
    python = job_python(plan.job.command)
    versions = installed(python)
    return {
        "torchaos": metadata.version("torchaos"),
        "torch": versions.get("torch", "not found"),
        "python": platform.python_version(),
        "job_python": python,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "commit": commit_of(Path(plan.job.cwd)),
    }


def commit_of(folder: Path) -> str:
    """The commit that is checked out in the folder, with `-dirty` if tracked files were changed. Empty if not known."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
