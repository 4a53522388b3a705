"""The key of a twin in the cache: a digest of everything that could change the results of the job.

In case of doubt, a fact is part of the key. A key that changes too often costs a run, but a stale twin makes the
verdict wrong."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from torchaos.harness import agent, checkpoints
from torchaos.harness.record.environment import editable, installed, job_python
from torchaos.harness.record.plan import Plan
from torchaos.harness.running.twins.inputs import digest, stamp

# Environment variables with these prefixes change the results of a job. So do all variables that its sources name.
_ENV = ("TORCH", "PYTORCH", "CUDA", "NCCL", "GLOO", "OMP", "MKL", "PYTHON", "ATEN", "LD_", "HF_", "ACCELERATE", "PL_")
_NAMED = re.compile(rb"""["']([A-Za-z_]\w*)["']|\$\{?([A-Za-z_]\w*)""")  # "EPOCHS", ${EPOCHS}
_NOT_SOURCES = {"node_modules", "site-packages", "__pycache__"}
_NO_MATTER = ("timeout_s", "resubmit_times", "resubmit_delay_s", "attach_pid")  # no effect on a job without faults
_MOST = 5000  # files of one folder


def key_of(plan: Plan) -> str:
    """The key, as 24 hexadecimal digits."""
    python = job_python(plan.job.command)
    sources = _sources(plan, python)
    parts = {
        "job": {name: value for name, value in asdict(plan.job).items() if name not in _NO_MATTER},
        "launcher": plan.launcher,
        "hooks": plan.hooks,
        "collect": [need.value for need in plan.collect],
        "sources": [(str(path), digest(path)) for path in sources],
        "data": [(str(path), *stamp(path)) for path in _files_below(_named(plan, Path.is_dir))],
        "observers": [
            digest(path) for room in (agent, checkpoints) for path in sorted(Path(room.__path__[0]).glob("*.py"))
        ],
        "installed": installed(python),
        "machine": [platform.machine(), platform.release(), platform.node(), os.cpu_count()],
        "environment": _environment(sources),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def _sources(plan: Plan, python: str) -> list[Path]:
    """The files that the command names, and all Python files in certain folders and below them: the folders of scripts
    that the command names, of modules that it names, of PYTHONPATH, and of editable installations."""
    named = _named(plan, Path.is_file)
    scripts = [path.parent for path in named if path.suffix == ".py"]
    search = plan.job.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")).split(os.pathsep)
    folders = [*scripts, *_modules(plan), *(Path(plan.job.cwd) / part for part in search if part), *editable(python)]
    return sorted({*named, *(path for path in _files_below(folders) if path.suffix == ".py")})


def _named(plan: Plan, fits: Callable[[Path], bool]) -> list[Path]:
    """The paths in the command for which `fits` is true, including those in `--option=PATH`."""
    cwd = Path(plan.job.cwd)
    words = [part for word in plan.job.command for part in (word, word.partition("=")[2]) if part]
    return [cwd / word for word in words if fits(cwd / word)]


def _modules(plan: Plan) -> Iterator[Path]:
    """The folder of a module or package that is run by `-m`."""
    words = plan.job.command
    for option, name in pairwise(words):
        if option in ("-m", "--module"):
            top = Path(plan.job.cwd) / name.partition(".")[0]
            yield top if top.is_dir() else top.parent if top.with_suffix(".py").is_file() else top


def _files_below(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in sorted(set(folders)):
        count = 0
        for root, below, names in os.walk(folder):
            below[:] = sorted(name for name in below if _may_hold_sources(Path(root, name)))
            for name in sorted(names):
                if count < _MOST:
                    yield Path(root, name)
                count += 1
            if count >= _MOST:
                break


def _may_hold_sources(folder: Path) -> bool:
    return folder.name[0] != "." and folder.name not in _NOT_SOURCES and not (folder / "pyvenv.cfg").exists()


def _environment(sources: Iterable[Path]) -> dict[str, str]:
    found = {name for path in sources for pair in _NAMED.findall(_start_of(path)) for name in pair}
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENV) or os.fsencode(name) in found
    }


def _start_of(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""
