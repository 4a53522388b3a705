"""Requests to a Toxiproxy server on the loopback interface. `Api` is used by the harness; it starts this module as a
process, which sends one request in the server's network:

    python -m torchaos.harness.host.toxiproxy PORT PARENT ORDER

ORDER is JSON: {"proxy": name, "add": [toxic, ...], "remove": prefix of names, "enabled": true}. All keys except `proxy`
are optional; {} changes nothing. The process prints all proxies by name, as they are afterwards.

It is a separate process, because the library toxiproxy keeps its server in a global variable, has no time limit, and
ignores most errors of a server. The harness can kill the process in time, and trusts only its output. The process dies
with PARENT. Otherwise it could change a proxy when the harness is dead and everything has been undone. The server is
identified by its pid and start time."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchaos.harness.host import processes
from torchaos.harness.host.network_namespace import NetworkNamespace

ASK_S = 8.0  # seconds; less than the time for which a rank is held


@dataclass(frozen=True)
class Api:
    """The HTTP interface of a server. `port`: its port on the loopback interface of its network."""

    pid: int
    start_ticks: int
    port: int

    def alive(self) -> bool:
        return processes.is_alive(self.pid, self.start_ticks)

    def ask(self, **order: object) -> Mapping[str, Any]:
        """Sends an order (see above). Returns all proxies as they are afterwards: {name: {"enabled", "toxics"}}. Raises
        OSError if the server does not answer in time, or if the answer can't be read."""
        client = [
            sys.executable,
            "-m",
            f"{__package__}.toxiproxy",
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
            command = NetworkNamespace(self.pid, self.start_ticks).enter(command)
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


_PDEATHSIG = 1  # linux/prctl.h


def main(port: int, order: dict[str, Any]) -> dict[str, Any]:
    from toxiproxy import Toxiproxy  # only here, since nothing else needs the library

    server = Toxiproxy()
    server.update_api_consumer("127.0.0.1", port)
    proxies = server.proxies()
    if "proxy" in order:
        proxy = proxies[order["proxy"]]
        for toxic in order.get("add", ()):
            proxy.add_toxic(**toxic)
        if prefix := order.get("remove"):
            for name in [name for name in proxy.toxics() if name.startswith(prefix)]:
                proxy.destroy_toxic(name)
        if "enabled" in order:
            proxy.enable() if order["enabled"] else proxy.disable()
        proxies = server.proxies()
    return {name: {"enabled": proxy.enabled, "toxics": sorted(proxy.toxics())} for name, proxy in proxies.items()}


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when the parent dies. Raises ProcessLookupError if the parent is dead
    already."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError(f"process {parent}, which asked, is gone")


if __name__ == "__main__":
    os.environ["NO_PROXY"] = "*"
    try:
        die_with(int(sys.argv[2]))
        print(json.dumps(main(int(sys.argv[1]), json.loads(sys.argv[3]))))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
