"""Asks a Toxiproxy server on this network's loopback: python -m torchaos.harness.machine.toxiproxy.client PORT PARENT
ORDER.

ORDER is JSON: {"proxy": name, "add": [toxic, ...], "remove": prefix of names, "enabled": true}, each but for `proxy`
only where it is wanted; {} only looks. Prints what the proxies are like afterwards, by name. A process of its own: the
client's library keeps its server in a global, knows no time limit, and passes over most errors that a server reports:
whoever asks ends it in time, and goes by what is printed. It dies with its PARENT, since an order that outlived whoever
gave it would come after all was taken back.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_PDEATHSIG = 1  # linux/prctl.h


def main(port: int, order: dict[str, Any]) -> dict[str, Any]:
    from toxiproxy import Toxiproxy  # where it is used: nothing else needs the library

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
    return {name: {"enabled": one.enabled, "toxics": sorted(one.toxics())} for name, one in proxies.items()}


def die_with(parent: int) -> None:
    """Raises ProcessLookupError where it is dead already."""
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
