"""Registers the torchaos commands of this user that are running. Another terminal can then list and end them, also
between two runs (while a twin is copied or a verdict is made). The file STATE/commands/PID-TICKS exists while the
process runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from torchaos.harness.machine import proc
from torchaos.harness.machine.disk import owner_only, write_atomically
from torchaos.harness.undo import open_runs
from torchaos.harness.undo.open_runs import Who


@dataclass(frozen=True)
class Command:
    """A torchaos command that is running."""

    who: Who
    boot: str
    host: str
    since_s: float  # seconds since the epoch
    scenarios: tuple[str, ...]

    @property
    def is_alive(self) -> bool:
        return self.host == proc.host() and self.boot == proc.boot_id() and proc.is_alive(*self.who)


@contextmanager
def at_work(scenarios: Sequence[str]) -> Iterator[None]:
    """Registers this process for the duration of the block. Raises OSError if the state directory can't be used."""
    who = (os.getpid(), proc.ticks_of(os.getpid()))
    command = Command(who, proc.boot_id(), proc.host(), time.time(), tuple(scenarios))
    path = open_runs.private(open_runs.state_home() / "commands") / f"{who[0]}-{who[1]}"
    write_atomically(path, json.dumps(asdict(command)), private=True)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def living() -> list[Command]:
    """The commands that are alive on this machine. Removes the entries of dead processes. Raises OSError if the state
    directory can't be used."""
    found = []
    for path in sorted(open_runs.private(open_runs.state_home() / "commands").glob("[0-9]*-*")):
        try:
            with open(path, opener=owner_only) as file:
                raw = json.load(file)
            command = Command(tuple(raw["who"]), raw["boot"], raw["host"], raw["since_s"], tuple(raw["scenarios"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the command ended just now
        if command.is_alive:
            found.append(command)
        elif command.host == proc.host():
            path.unlink(missing_ok=True)
    return found
