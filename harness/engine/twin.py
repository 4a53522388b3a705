"""The fault-free run that a faulted one is judged against, and its cache.

A twin is an ordinary run of the same plan without its faults, kept under everything that could change it (twin_key.py).
Only what a verdict needs is kept, not the checkpoints themselves.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from platformdirs import user_cache_path

from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import ChaosError
from torchaos.harness.engine.twin_key import key_of
from torchaos.harness.plan import Plan
from torchaos.harness.record import Record
from torchaos.harness.rundir import RunDir
from torchaos.harness.undo.client import UndoError, heal_from_log

MOST_TWINS, MOST_BYTES = 200, 10 << 30  # that the cache keeps
_TRIES = 4
_LOOK_S = 0.2  # how often it is looked whether another run's twin is done
_KEPT = ("plan.json", "events", "artifacts", "logs")


class Twins:
    """The twins of one plan. `execute` runs a plan in a run directory: the engine itself, handed in."""

    def __init__(
        self, plan: Plan, execute: Callable[[Plan, RunDir], None], cache: Path | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """`given_up`: whether the user wants no more of it, asked while another run's twin is being waited for."""
        self._plan = fault_free(plan)
        self._execute, self._given_up = execute, given_up
        self._home = (cache or user_cache_path("torchaos")) / "twins" / key_of(self._plan)

    def give(self, number: int, to: RunDir) -> bool:
        """Copy the record of the twin `number` (from 0) into a run directory, running it first where it isn't cached.
        False when the twin's job itself failed, or was ended early: then it is no measure for anything. Raises
        ChaosError where the cache can't be written."""
        try:
            with self._locked() as mine:
                kept = self._home / str(number)
                if not mine or not (kept.is_dir() or self._make(number, kept)):
                    return False
                os.utime(self._home)  # used now: the oldest are forgotten first
                shutil.copytree(kept, to.twins / str(number), copy_function=_link_or_copy)
        except OSError as error:
            raise ChaosError(
                f"{self._home}: the twin can't be kept: {error}; write twin: none to go without"
            ) from error
        return True

    def _make(self, number: int, kept: Path) -> bool:
        """A healthy job may abort while it exits (torch's teardown), and is then done again by torchrun: such a run is
        no twin, and another is tried. One that fails is left where it ran, so that its log can be read."""
        self._clear()
        for _ in range(_TRIES):
            folder = RunDir(self._home / f"run-{number}-{os.getpid()}")
            folder.create()
            self._execute(self._plan, folder)
            record = Record.load(folder)
            if finished_well(record):
                break
            shutil.rmtree(self._home / "failed", ignore_errors=True)
            folder.root.rename(self._home / "failed")
            if last_exit_code(record) != 0 or _was_stopped(record):
                return False
        else:
            return False
        partial = self._home / f".{number}-{os.getpid()}"
        partial.mkdir(mode=0o700)
        for name in _KEPT:
            (folder.root / name).rename(partial / name)
        partial.rename(kept)
        shutil.rmtree(folder.root)
        forget_old(self._home)
        return True

    def _clear(self) -> None:
        """What harnesses that were killed over a twin left here: the lock is ours, so none of them lives. One may have
        had our number: containers count pids from 1."""
        for left in (*self._home.glob("run-*"), *self._home.glob(".[0-9]*-*")):
            with suppress(UndoError):  # its reaper is at it
                if all(one.verified for one in heal_from_log(left)):
                    shutil.rmtree(left, ignore_errors=True)

    @property
    def failed_log(self) -> Path:
        return self._home / "failed" / "logs" / "job-0.log"

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Two runs that want one twin at the same time: the second waits and finds it in the cache. False when the user
        gave up waiting."""
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self._home / "lock", "w") as lock:
            while not (mine := _lock(lock.fileno())) and not self._given_up():
                time.sleep(_LOOK_S)
            yield mine


def forget_old(newest: Path) -> None:
    """Bound the cache that `newest` is part of: those that were not used for the longest time are removed, unless
    somebody works with them."""
    homes = sorted((path for path in newest.parent.iterdir() if path != newest), key=lambda path: path.stat().st_mtime)
    sizes = {path: _size(path) for path in (*homes, newest)}
    for home in homes:
        if len(sizes) <= MOST_TWINS and sum(sizes.values()) <= MOST_BYTES:
            return
        with suppress(OSError), open(home / "lock", "w") as lock:
            if _lock(lock.fileno()):
                shutil.rmtree(home, ignore_errors=True)
                del sizes[home]


def _size(folder: Path) -> int:
    """Bytes on disk."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            found += path.lstat().st_blocks * 512
    return found


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def fault_free(plan: Plan) -> Plan:
    return replace(plan, faults=(), stop=(), steady_state=(), asserts=(), twin={})


def finished_well(twin: Record) -> bool:
    return last_exit_code(twin) == 0 and len(twin.history.attempts) == 1 and not _was_stopped(twin)


def _was_stopped(twin: Record) -> bool:
    """A job that is ended early may well save, and end with exit code 0."""
    return any(twin.of_kind(Kind.STOPPED))


def last_exit_code(run: Record) -> int | None:
    codes = [event.data["exit_code"] for event in run.of_kind(Kind.JOB_EXITED)]
    return codes[-1] if codes else None


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
