"""Requests to a Toxiproxy server. `api` makes them in the harness; `client` is a process that sends them in the
server's network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.harness.host import processes
from torchaos.harness.host.netspace import Space

# The Toxiproxy server of a run, and requests to it. The server is identified by its pid and start time.

ASK_S = 8.0  # seconds; less than a rank is held


@dataclass(frozen=True)
class Api:
    """The HTTP interface of a server. `port`: its port on the loopback interface of its network."""

    pid: int
    start_ticks: int
    port: int

    def alive(self) -> bool:
        return processes.is_alive(self.pid, self.start_ticks)

    def ask(self, **order: object) -> Mapping[str, Any]:
        """Carries out an order (see toxiproxy_client.py). Returns all proxies as they are afterwards: {name:
        {"enabled", "toxics"}}. Raises OSError if the server does not answer in time, or if the answer can't be read."""
        client = [
            sys.executable,
            "-m",
            f"{__package__}.toxiproxy_client",
            str(self.port),
            str(os.getpid()),
            json.dumps(order),
        ]
        output = self.run(client)
        try:
            found: dict[str, Any] = json.loads(output)
        except ValueError as error:
            raise OSError(f"Toxiproxy (pid {self.pid}) gave an answer that can't be read: {output[:200]!r}") from error
        return found

    def run(self, command: Sequence[str]) -> str:
        """The output of a command that runs in the server's network. Raises ProcessLookupError if the server is gone,
        TimeoutError if there is no answer in time, and OSError with the message of the command if it fails."""
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
            # The command must not start in a folder of the user, because Python imports modules from its current
            # folder.
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False, cwd="/")
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the Toxiproxy server (pid {self.pid}) did not answer within {ASK_S:g} s") from error
        if done.returncode and not self.alive():
            raise gone
        if done.returncode:
            raise OSError(f"the Toxiproxy server (pid {self.pid}): {done.stderr.strip()[-300:] or 'no answer'}")
        return done.stdout
