"""The key of a twin in the cache: a digest of everything that could change the results of the job.

In case of doubt, a fact is part of the key. A key that changes too often costs a run, but a stale twin makes the
verdict wrong."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchaos.harness import agent, checkpoints
from torchaos.harness.record.environment import editable, importable, installed, job_python
from torchaos.harness.record.plan import Plan
from torchaos.harness.running.twins.inputs import digest, digest_of, stamp
from torchaos.harness.running.twins.sources import used, variables_in

# Environment variables with these prefixes change the results of a job. So do all variables that its sources name.
_ENV = ("TORCH", "PYTORCH", "CUDA", "NCCL", "GLOO", "OMP", "MKL", "PYTHON", "ATEN", "LD_", "HF_", "ACCELERATE", "PL_")
_NOT_SOURCES = {"node_modules", "site-packages", "__pycache__"}
_NO_MATTER = ("timeout_s", "resubmit_times", "resubmit_delay_s", "attach_pid")  # no effect on a job without faults
_MOST = 5000  # files of one folder
# Parts by name, and what comes before the name of that which has changed.
_NAMED_PARTS = {"sources": "", "data": "", "environment": "the variable ", "installed": "the package ", "job": "job."}
_PLAIN_PARTS = {"machine": "the machine has changed", "observers": "torchaos has changed"}

Parts = dict[str, Any]


def key_of(plan: Plan) -> str:
    """The key, as 24 hexadecimal digits."""
    return key_in(parts_of(plan))


def key_in(parts: Parts) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def parts_of(plan: Plan) -> Parts:
    """All that goes into the key, as JSON. What may hold a secret, such as a variable, is a digest."""
    python = job_python(plan.job.command)
    sources = _sources(plan, python)
    return {
        "job": {
            name: digest_of(json.dumps(value)) for name, value in asdict(plan.job).items() if name not in _NO_MATTER
        },
        "launcher": plan.launcher,
        "needs": [[*plan.hooks], [need.value for need in plan.collect]],
        "sources": {str(path): digest(path) for path in sources},
        "data": {str(path): [*stamp(path)] for path in _files_below(_named(plan, Path.is_dir))},
        "observers": [
            digest(path) for room in (agent, checkpoints) for path in sorted(Path(room.__path__[0]).glob("*.py"))
        ],
        "installed": installed(python),
        "machine": [platform.machine(), platform.release(), platform.node(), os.cpu_count()],
        "environment": _environment(sources),
    }


def difference(parts: Parts, before: Parts) -> str:
    """What has changed since a twin with other parts was made, as a clause. Empty if it was made for another job, or
    for assertions that need other data."""
    if any(parts[name] != before[name] for name in ("launcher", "needs")):
        return ""
    if any(parts["job"][name] != before["job"].get(name) for name in ("command", "cwd", "env")):
        return ""
    for name, words in _NAMED_PARTS.items():
        now, then = parts[name], before[name]
        if changed := next((one for one in sorted({*now, *then}) if now.get(one) != then.get(one)), None):
            how = "is new" if changed not in then else "is gone" if changed not in now else "has changed"
            return f"{words}{changed} {how}"
    return next((words for name, words in _PLAIN_PARTS.items() if parts[name] != before[name]), "")


def sources_changed(plan: Plan, since_s: float) -> bool:
    """Whether a source of the job was changed after this time (seconds since the epoch)."""
    return any(stamp(path)[1] >= since_s * 1e9 for path in _sources(plan, job_python(plan.job.command)))


def _sources(plan: Plan, python: str) -> list[Path]:
    """The files that the command names, and the Python files that the job may use, in certain folders and below them:
    the folders of scripts that the command names, of modules that it names, of PYTHONPATH, and of editable
    installations."""
    named = _named(plan, Path.is_file)
    scripts = [path.parent for path in named if path.suffix == ".py"]
    search = plan.job.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")).split(os.pathsep)
    folders = [*scripts, *_modules(plan), *(Path(plan.job.cwd) / part for part in search if part), *editable(python)]
    there = [path for path in _files_below(folders) if path.suffix == ".py"]
    names = importable(python)
    words = [*plan.job.command, *plan.job.env.values()]
    return sorted(used(named, words, there, names) if names else {*named, *there})


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
    found = variables_in(sources)
    return {
        name: digest_of(value) for name, value in os.environ.items() if name.startswith(_ENV) or name in found
    }  # fmt: skip
