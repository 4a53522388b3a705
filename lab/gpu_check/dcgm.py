"""DCGM reads NVML through the overlay: its host engine is started on it, and an ordered temperature must be shown."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from row import KEEP, need_gpu, not_possible, overlaid


def main() -> int:
    need_gpu()
    programs = [shutil.which(name) for name in ("nv-hostengine", "dcgmi")]
    if None in programs:
        not_possible("nv-hostengine and dcgmi are not on the path")
    socket, control = KEEP / "dcgm.sock", Path(KEEP, "dcgm")
    control.mkdir(exist_ok=True)
    (control / "orders.nvml").write_text("gpu0.temperature = 123\n")
    engine = subprocess.Popen([str(programs[0]), "-n", "-d", str(socket), "--log-level", "NONE"], env=overlaid(control))
    try:
        ask = [str(programs[1]), "dmon", "--host", f"unix://{socket}", "-e", "150", "-c", "3"]
        shown = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    finally:
        engine.terminate()
        engine.wait()
    print(shown)
    print(f"dcgmi shows {'the ordered 123 degrees' if '123' in shown else 'what the driver says'}")
    return int("123" not in shown)


if __name__ == "__main__":
    sys.exit(main())
