"""Starts the command that follows, beside a lighthouse: torchft's servers of all replicas meet there. The first replica
keeps it, outside of its ranks; the others find its address in the file that is named first."""

import os
import subprocess
import sys
import time
from pathlib import Path

from torchft.coordination import LighthouseServer


def main():
    file, replicas = Path(sys.argv[1]), int(os.environ["NUM_REPLICA_GROUPS"])
    if os.environ["REPLICA_GROUP_ID"] == "0":
        server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000 * (replicas - 1))
        written = file.with_suffix(".written")
        written.write_text(server.address())
        written.rename(file)
    while not file.exists():
        time.sleep(0.05)
    return subprocess.call(sys.argv[2:], env={**os.environ, "TORCHFT_LIGHTHOUSE": file.read_text()})


if __name__ == "__main__":
    sys.exit(main())
