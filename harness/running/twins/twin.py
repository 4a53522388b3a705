"""The fault-free run that a faulted one is judged against, and its cache.

A twin is an ordinary run of the same plan without its faults, kept under everything that could change it and is known
beforehand (twin_key.py), and as long as what its job read is as it was (inputs.py). Only what a verdict needs is kept,
not the checkpoints themselves.

The twins of one key are of one generation: twin 0 begins it, and when it is not to be used any more, all are removed.
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

from torchaos.harness.contracts import ChaosError
from torchaos.harness.judging.ending.unstarted import died_at_start
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.record import Record
from torchaos.harness.record.replicas import records_of
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.twins.inputs import Inputs
from torchaos.harness.running.twins.twin_key import key_of
from torchaos.harness.undo.client import UndoError, heal_from_log

MOST_TWINS, MOST_BYTES = 200, 10 << 30  # that the cache keeps
_TRIES = 4
_LOOK_S = 0.2  # how often it is looked whether another run's twin is done
_KEPT = ("plan.json", "events", "artifacts", "logs")
_MADE = "made.json"  # beside them: when it was made, and what its job read


class Twins:
    """The twins of one plan. `execute` runs a plan in a run directory: the engine itself, handed in."""

    def __init__(
        self, plan: Plan, execute: Callable[[Plan, RunDir], None], cache: Path | None = None,
        given_up: Callable[[], bool] = lambda: False, tell: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """`given_up`: whether the user wants no more of it, asked while another run's twin is being waited for. `tell`
        is told why twins that were there are made anew."""
        self._plan = fault_free(plan)
        self._execute, self._given_up, self._tell = execute, given_up, tell
        self._home = (cache or user_cache_path("torchaos")) / "twins" / key_of(self._plan)
        self._first: Inputs | None = None  # of the generation that was given
        self.died = ""  # what the twin's job said, where it died before its first step
        self.refused = ""  # why no further twin of it can be had

    def give(self, number: int, to: RunDir) -> bool:
        """Copy the record of the twin `number` (from 0) into a run directory, running it first where it isn't cached.
        False when the twin's job itself failed, or was ended early: then it is no measure for anything. So it is, and
        `refused` says why, where it would not be of the generation of the twin 0 that was given. Raises ChaosError
        where the cache can't be written."""
        try:
            with self._locked() as mine:
                kept = self._home / str(number)
                if not mine or not self._is_current(number):
                    return False
                if not (kept.is_dir() or self._make(number, kept)):
                    return False
                self._first = self._first if number else made_of(kept)
                os.utime(self._home)  # used now: the oldest are forgotten first
                shutil.copytree(kept, to.twins / str(number), copy_function=_link_or_copy)
        except OSError as error:
            raise ChaosError(
                f"{self._home}: the twin can't be kept: {error}; write twin: none to go without"
            ) from error
        return True

    def has(self, number: int) -> bool:
        """Whether it is in the cache."""
        return (self._home / str(number)).is_dir()

    def renew(self, why: str) -> bool:
        """Remove the generation that was given, unless another run has done so. False where the user gave up waiting
        for another run."""
        with self._locked() as mine:
            if mine and made_of(self._home / "0") == self._first:
                self._forget(why)
            return mine

    def _is_current(self, number: int) -> bool:
        first = made_of(self._home / "0")
        why = first.changed() if first else "what its job read is not known" if self.has(0) else ""
        if number == 0:
            if why:
                self._forget(why)
            return True
        self.refused = why or ("" if first == self._first else "twin 0 was made anew meanwhile, for another run")
        return not self.refused

    def _forget(self, why: str) -> None:
        self._tell(f"the twin is made anew: {why}")
        for kept in self._home.glob("[0-9]*"):
            shutil.rmtree(kept)

    def _make(self, number: int, kept: Path) -> bool:
        """A healthy job may abort while it exits (torch's teardown), and is then done again by torchrun: such a run is
        no twin, and another is tried. One that fails is left where it ran, so that its log can be read."""
        self._clear()
        for _ in range(_TRIES):
            folder = RunDir(self._home / f"run-{number}-{os.getpid()}")
            folder.create()
            began_s = time.time()
            self._execute(self._plan, folder)
            record = Record.load(folder)
            if finished_well(record):
                break
            shutil.rmtree(self._home / "failed", ignore_errors=True)
            folder.root.rename(self._home / "failed")
            if record.exit_code != 0 or record.stopped:
                self.died = died_at_start(record)
                return False
        else:
            return False
        partial = self._home / f".{number}-{os.getpid()}"
        partial.mkdir(mode=0o700)
        for name in _KEPT:
            (folder.root / name).rename(partial / name)
        (partial / _MADE).write_text(Inputs.of(folder, began_s).to_json())
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
    """Its agents record what the job reads, too."""
    hooks = tuple(sorted({*plan.hooks, "reads"}))
    return replace(plan, faults=(), stop=(), steady_state=(), asserts=(), twin={}, hooks=hooks)


def last_step_of(plan: Plan, cache: Path | None = None) -> int | None:
    """At which step the job ends by itself, as its twin in the cache says; None where there is none of this job."""
    kept = (cache or user_cache_path("torchaos")) / "twins" / key_of(fault_free(plan)) / "0"
    made = made_of(kept)
    try:
        steps = [one.history.last_step for one in records_of(Record.load(RunDir(kept)))] if made else []
        return None if made is None or made.changed() else max(step for step in steps if step is not None)
    except (ChaosError, OSError, ValueError):  # it is being removed, or it is damaged: the run makes another
        return None


def made_of(twin: Path) -> Inputs | None:
    """When it was made, and of what; None where that is not there, or damaged."""
    try:
        return Inputs.from_json((twin / _MADE).read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finished_well(twin: Record) -> bool:
    return twin.exit_code == 0 and len(twin.history.attempts) == 1 and not twin.stopped


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
