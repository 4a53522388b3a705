"""Conditions about free disk space, or about the result of a command. Each brings a probe that makes the observation;
the condition itself is a pure function of the events."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from torchaos.harness.base_classes import Condition, Seconds
from torchaos.harness.host import processes
from torchaos.harness.interfaces import Emit, Probe, Watched
from torchaos.harness.protocol.wire import ENV_RUN_ID, Event, Kind
from torchaos.harness.record.events.merged import last_answer
from torchaos.harness.scenario.field_types import Bytes, size_in_words

Time = Annotated[Seconds, Field(gt=0)]
_LOOK_S, _END_S = 0.02, 10.0
_ENV_TAG = "TORCHAOS_COMMAND"  # a mark that distinguishes the processes of one command from those of another


@dataclass(frozen=True)
class DiskFree(Condition):
    """Less than `below` bytes are free on a disk. `of`: the disk of the run directory (`run`) or of the job's
    checkpoints (`checkpoints`)."""

    below: Bytes
    of: Literal["run", "checkpoints"] = "run"

    name: ClassVar[str] = "disk_free"
    about_job: ClassVar[bool] = False

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        return last_answer(events, self._key)

    def probes(self, at: Watched) -> Sequence[Probe]:
        return [_Disk(self._key, at.run_dir if self.of == "run" else at.checkpoints or at.run_dir, self.below)]

    @property
    def _key(self) -> str:
        return f"disk_free of {self.of} below {self.below}"


@dataclass(frozen=True)
class CommandFails(Condition):
    """The command `run` (a program and its arguments; no shell) can't be started, takes longer than `timeout`, or ends
    with an exit code other than 0. It is run each `every` seconds."""

    run: list[str]
    every: Time = 10.0
    timeout: Time = 10.0

    name: ClassVar[str] = "command_fails"
    about_job: ClassVar[bool] = False
    good: ClassVar[bool] = False  # whether the condition holds if the command succeeds

    def holds(self, events: Sequence[Event], now_s: float) -> bool | None:
        return last_answer(events, _command_key(self.name, self.run))

    def probes(self, at: Watched) -> Sequence[Probe]:
        return [_Command(_command_key(self.name, self.run), self.run, self.every, self.timeout, at, self.good)]


@dataclass(frozen=True)
class CommandSucceeds(CommandFails):
    """The command `run` (a program and its arguments; no shell) ends with exit code 0 within `timeout`. It is run each
    `every` seconds."""

    name: ClassVar[str] = "command_succeeds"
    good: ClassVar[bool] = True


class _Answers:
    """Emits an answer only if it differs from the previous answer."""

    def __init__(self, key: str, period_s: float) -> None:
        self.period_s, self._key = period_s, key
        self._last: bool | None = None

    def say(self, emit: Emit, holds: bool, reason: str) -> None:
        if holds is not self._last:
            self._last = holds
            emit(Kind.PROBED, {"probe": self._key, "holds": holds, "reason": reason})


class _Disk(_Answers):
    def __init__(self, key: str, path: Path, below: int) -> None:
        super().__init__(key, 1.0)
        self._path, self._below = path, below

    def sample(self, emit: Emit) -> None:
        place = next(path for path in (self._path, *self._path.parents) if path.exists())  # the job makes it later
        try:
            free = shutil.disk_usage(place).free
        except OSError as error:
            return self.say(emit, True, f"{place}: the free space is not known: {error.strerror}")
        return self.say(emit, free < self._below, f"{size_in_words(free)} are free at {place}")


class _Command(_Answers):
    def __init__(
        self, key: str, argv: Sequence[str], every_s: float, timeout_s: float, at: Watched, good: bool
    ) -> None:
        super().__init__(key, every_s)
        self._argv, self._timeout_s, self._at, self._good = list(argv), timeout_s, at, good

    def sample(self, emit: Emit) -> None:
        ok, reason = self._run()
        if not self._at.ended.is_set():
            self.say(emit, ok is self._good, reason)

    def _run(self) -> tuple[bool, str]:
        """Runs the command. Returns whether it succeeded, and a sentence about that. The command has a session of its
        own and the mark of the run, so that none of its processes outlives the time-out or the run."""
        tag = f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            process = subprocess.Popen(
                self._argv, env={**os.environ, ENV_RUN_ID: self._at.mark, _ENV_TAG: tag}, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return False, f"{self._argv[0]} can't be run: {error.strerror}"
        end = time.monotonic() + self._timeout_s
        try:
            while process.poll() is None and time.monotonic() < end and not self._at.ended.wait(_LOOK_S):
                pass
        finally:
            code = process.poll()
            processes.end(partial(processes.family, tag, _ENV_TAG), _END_S)
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                process.wait(1.0)
        late = f"{self._argv[0]} took longer than {self._timeout_s:g} s"
        return code == 0, late if code is None else f"{self._argv[0]} ended with {code}"


def _command_key(name: str, argv: Sequence[str]) -> str:
    """A name for the command without its arguments, which may hold a secret."""
    return f"{name} {argv[0] if argv else ''} {hashlib.blake2b(repr(argv).encode(), digest_size=4).hexdigest()}"
