"""Runs a command beside a lighthouse, at which torchft's replicas meet: python with_lighthouse.py FILE COMMAND...

The first replica keeps the lighthouse, outside of its ranks. The others find its address in FILE."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path


def main(file: Path, command: list[str]) -> int:
    replicas = int(os.environ["NUM_REPLICA_GROUPS"])
    if find_spec("torchft") is None:
        sys.exit("with_lighthouse.py: torchft is missing: pip install 'torchaos[torchft]'")
    if os.environ["REPLICA_GROUP_ID"] == "0":
        from torchft.coordination import LighthouseServer  # it imports torch

        server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000 * (replicas - 1))
        written = file.with_suffix(".written")
        written.write_text(server.address())
        written.rename(file)
    while not file.exists():
        time.sleep(0.05)
    return subprocess.call(command, env={**os.environ, "TORCHFT_LIGHTHOUSE": file.read_text()})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
