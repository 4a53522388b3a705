"""A Toxiproxy server of a run, and how it is asked. The server is known by its process, whose network it is in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.harness.machine import proc
from torchaos.harness.machine.netspace import Space

ASK_S = 8.0  # less than a rank is held for


@dataclass(frozen=True)
class Api:
    """`port` is that of its HTTP interface, on the loopback of its network."""

    pid: int
    start_ticks: int
    port: int

    def alive(self) -> bool:
        return proc.is_alive(self.pid, self.start_ticks)

    def ask(self, **order: object) -> Mapping[str, Any]:
        """What its proxies are like once the order (see client.py) is carried out: {name: {"enabled", "toxics"}}.
        Raises OSError where it does not answer in time, or says anything else."""
        client = [sys.executable, "-m", f"{__package__}.client", str(self.port), str(os.getpid()), json.dumps(order)]
        said = self.run(client)
        try:
            found: dict[str, Any] = json.loads(said)
        except ValueError as error:
            raise OSError(f"Toxiproxy (pid {self.pid}) said what can't be read: {said[:200]!r}") from error
        return found

    def run(self, command: Sequence[str]) -> str:
        """The output of a tool in the server's network. Raises ProcessLookupError where the server is gone,
        TimeoutError where it does not answer in time, OSError with what the tool says."""
        gone = ProcessLookupError(f"the Toxiproxy server (pid {self.pid}) is gone")
        if not self.alive():
            raise gone
        try:
            elsewhere = os.readlink(f"/proc/{self.pid}/ns/net") != os.readlink("/proc/self/ns/net")
        except FileNotFoundError:
            raise gone from None
        if elsewhere:
            command = Space(self.pid, self.start_ticks).enter(command)
        try:
            # In no folder of the user's: Python imports from the one that it is started in.
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False, cwd="/")
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the Toxiproxy server (pid {self.pid}) did not answer within {ASK_S:g} s") from error
        if done.returncode and not self.alive():
            raise gone
        if done.returncode:
            raise OSError(f"the Toxiproxy server (pid {self.pid}): {done.stderr.strip()[-300:] or 'no answer'}")
        return done.stdout
