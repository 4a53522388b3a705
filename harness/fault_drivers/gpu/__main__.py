"""`python -m torchaos.harness.fault_drivers.gpu [--control PATH] COMMAND...`: runs a command that sees the NVML
overlay.

It is for programs that watch GPUs: a node health agent, nvidia-smi, a device plugin, a DCGM host engine. The job's
ranks don't get the overlay, because NCCL reads its topology from NVML."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchaos.harness.host.native_libraries import ENV_CONTROL, ENV_PATH, NVML
from torchaos.harness.interfaces import UsageError


def environment(control: str | None) -> dict[str, str]:
    """The environment of a process that loads the overlay. Raises UsageError if there is no overlay."""
    overlay = os.environ.get(ENV_PATH) or str(NVML.path().parent)
    others = os.environ.get("LD_LIBRARY_PATH")
    paths = {"LD_LIBRARY_PATH": f"{overlay}:{others}" if others else overlay, ENV_PATH: overlay}
    return {**os.environ, **paths, **({ENV_CONTROL: str(Path(control).absolute())} if control else {})}


def main(arguments: list[str]) -> int:
    control = None
    if arguments[:1] == ["--control"] and len(arguments) > 1:
        control, arguments = arguments[1], arguments[2:]
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 3
    try:
        os.execvpe(arguments[0], arguments, environment(control))
    except (UsageError, OSError) as error:
        print(f"torchaos: {arguments[0]}: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
