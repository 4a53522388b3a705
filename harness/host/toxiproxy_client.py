"""Sends an order to a Toxiproxy server on the loopback interface: python -m torchaos.harness.host.toxiproxy_client
PORT PARENT ORDER.

ORDER is JSON: {"proxy": name, "add": [toxic, ...], "remove": prefix of names, "enabled": true}. All keys but `proxy`
are optional; {} changes nothing. Prints all proxies as they are afterwards, by name.

This is a separate process, because the library toxiproxy keeps its server in a global variable, has no time limit, and
ignores most errors of a server. The caller can kill the process in time, and trusts only its output. The process dies
with PARENT. Otherwise an order could be carried out after the harness is dead and everything was undone."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

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
