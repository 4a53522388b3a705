"""What a machine can do: each capability is a name that injectors ask for, a check, and how to get it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from torchaos.harness.environment import installed, resolve_program


@dataclass(frozen=True)
class Finding:
    name: str
    present: bool
    detail: str
    remedy: str  # what to do where it is missing


@dataclass(frozen=True)
class _Check:
    used_for: str
    find: Callable[[], str | None]  # what was found, or None
    remedy: str


def check(name: str) -> Finding:
    """Raises KeyError for a name that is in no table: a fault in an injector, not in the machine."""
    one = CHECKS[name]
    found = one.find()
    return Finding(name, found is not None, f"{one.used_for}; {found or 'missing'}", one.remedy)


def _pidfd() -> str | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return None
    return f"Linux {os.uname().release}"


def _agent() -> str | None:
    return f"Python {sys.version_info.major}.{sys.version_info.minor}" if sys.platform == "linux" else None


def _torchrun() -> str | None:
    try:
        return resolve_program("torchrun", Path.cwd())
    except Exception:
        return None


def _torch() -> str | None:
    return f"torch {version}" if (version := installed(sys.executable).get("torch")) else None


def _root() -> str | None:
    return "root" if os.geteuid() == 0 else None


def _own_processes() -> str | None:
    return "/proc" if Path(f"/proc/{os.getpid()}/environ").exists() else None


def _module(name: str) -> Callable[[], str | None]:
    return lambda: name if util.find_spec(name) else None


CHECKS: dict[str, _Check] = {
    "pidfd": _Check("signals that can't reach a stranger", _pidfd, "needs Linux 5.3 or later and Python 3.9 or later"),
    "proc": _Check("finding ranks and orphans", _own_processes, "mount /proc"),
    "agent": _Check(
        "faults at an exact step and phase", _agent, "needs Linux; the job must be launched, not attached to"
    ),
    "torchrun": _Check("starting jobs", _torchrun, "pip install torch, or put torchrun on the PATH"),
    "torch": _Check("reading checkpoints tensor by tensor", _torch, "pip install torch beside torchaos"),
    "root": _Check("faults in networks, mounts and cgroups", _root, "run as root, or leave such scenarios out"),
}
