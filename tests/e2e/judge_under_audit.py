"""Judges a run directory under an audit hook. Prints every socket, process or outside path that judging used."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchaos.harness import registry
from torchaos.harness.analysis.verdict import judge
from torchaos.harness.record.rundir import RunDir

folder = Path(sys.argv[1])
for group in registry.GROUPS:
    registry.all_of(group)  # plug-ins are imported before the watch begins
judge(RunDir(folder))  # and so is what they import when they are first used
outside: list[str] = []


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if event.startswith(("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system")):
        outside.append(event)
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = Path(os.fsdecode(arguments[0]))
        writes = isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if writes or folder not in [path, *path.parents]:
            outside.append(f"open {path}")


sys.addaudithook(watch)
result = judge(RunDir(folder))
print("outside:", ", ".join(outside) or "none")
sys.exit(result.exit_code)
