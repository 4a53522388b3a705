"""Processes that the tests start themselves, and waiting on conditions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a process (by default one that sleeps) with text pipes; it is ended and reaped after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str, **kwargs: Any) -> subprocess.Popen[str]:
        env = {**os.environ, **kwargs.pop("env", {})}
        command = list(argv) or ["sleep", "600"]
        process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, **kwargs)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


@pytest.fixture
def python(spawn: Spawn) -> Spawn:
    """As `spawn`, running Python code."""
    return lambda code, *argv, **kwargs: spawn(sys.executable, "-c", code, *argv, **kwargs)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    (path / "undo").mkdir(parents=True)
    return path


@pytest.fixture
def state_of() -> Callable[[int], str]:
    """The letter of /proc/PID/stat; empty when there is no such process."""

    def read(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""

    return read
