"""The fault-free run that a faulted one is judged against, and its cache.

A twin is an ordinary run of the same plan without its faults, kept under everything that could change it: the command,
the sources beside the script, the interpreter and every distribution it has, the machine, the environment that
frameworks read, and the agent's own sources. Only what a verdict needs is kept, not the checkpoints themselves.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from platformdirs import user_cache_path

from torchaos.harness import agent
from torchaos.harness.agent.wire import Kind
from torchaos.harness.environment import installed, job_python
from torchaos.harness.plan import Plan
from torchaos.harness.record import Record
from torchaos.harness.rundir import RunDir

# Environment variables with these beginnings change what a job computes; others are taken not to.
_ENV = ("TORCH", "PYTORCH", "CUDA", "NCCL", "GLOO", "OMP", "MKL", "PYTHON", "ATEN", "LD_", "HF_", "ACCELERATE", "PL_")
_SOURCES_MAX = 2000
_TRIES = 4
_NO_MATTER = ("timeout_s", "resubmit_times", "resubmit_delay_s", "attach_pid")  # to a job that no fault hits
_KEPT = ("plan.json", "events", "artifacts", "logs")


class Twins:
    """The twins of one plan. `execute` runs a plan in a run directory: the engine itself, handed in."""

    def __init__(self, plan: Plan, execute: Callable[[Plan, RunDir], None], cache: Path | None = None) -> None:
        self._plan = fault_free(plan)
        self._execute = execute
        self._home = (cache or user_cache_path("torchaos")) / "twins" / key_of(self._plan)

    def give(self, number: int, to: RunDir) -> bool:
        """Copy the record of the twin `number` (from 0) into a run directory, running it first where it isn't cached.
        False when the twin's job itself failed: then it is no measure for anything."""
        with self._locked():
            kept = self._home / str(number)
            if not kept.is_dir() and not self._make(number, kept):
                return False
            shutil.copytree(kept, to.twins / str(number), copy_function=_link_or_copy)
        return True

    def _make(self, number: int, kept: Path) -> bool:
        """A healthy job may abort while it exits (torch's teardown), and is then done again by torchrun: such a run is
        no twin, and another is tried. One that fails is left where it ran, so that its log can be read."""
        for _ in range(_TRIES):
            folder = RunDir(self._home / f"run-{number}-{os.getpid()}").create()
            self._execute(self._plan, folder)
            record = Record.load(folder)
            if finished_well(record):
                break
            shutil.rmtree(self._home / "failed", ignore_errors=True)
            folder.root.rename(self._home / "failed")
            if last_exit_code(record) != 0:
                return False
        else:
            return False
        partial = self._home / f".{number}-{os.getpid()}"
        partial.mkdir(mode=0o700)
        for name in _KEPT:
            (folder.root / name).rename(partial / name)
        partial.rename(kept)
        shutil.rmtree(folder.root)
        return True

    @property
    def failed_log(self) -> Path:
        return self._home / "failed" / "logs" / "job-0.log"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Two runs that want one twin at the same time: the second waits and finds it in the cache."""
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self._home / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def fault_free(plan: Plan) -> Plan:
    return replace(plan, faults=(), stop=(), steady_state=(), asserts=(), twin={})


def finished_well(twin: Record) -> bool:
    return last_exit_code(twin) == 0 and len(twin.history.attempts) == 1


def last_exit_code(run: Record) -> int | None:
    codes = [event.data["exit_code"] for event in run.of_kind(Kind.JOB_EXITED)]
    return codes[-1] if codes else None


def key_of(plan: Plan) -> str:
    """A digest of everything that could change what the job computes."""
    python = job_python(plan.job.command)
    parts = {
        "job": {name: value for name, value in asdict(plan.job).items() if name not in _NO_MATTER},
        "hooks": plan.hooks,
        "collect": [need.value for need in plan.collect],
        "sources": [(str(path), _digest(path)) for path in _sources(plan)],
        "agent": [_digest(path) for path in sorted(Path(agent.__path__[0]).glob("*.py"))],
        "installed": installed(python),
        "machine": [platform.machine(), platform.release(), platform.node(), os.cpu_count()],
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENV)},
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def _sources(plan: Plan) -> list[Path]:
    """The files that the command names, and every Python file beside or below such a script."""
    cwd = Path(plan.job.cwd)
    named = [cwd / word for word in plan.job.command if (cwd / word).is_file()]
    beside = [
        path
        for script in named
        if script.suffix == ".py"
        for path in sorted(script.parent.rglob("*.py"))[:_SOURCES_MAX]
    ]
    return sorted({*named, *beside})


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
