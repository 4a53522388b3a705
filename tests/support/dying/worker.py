"""Plays one death after another: reads deaths from stdin, a JSON array a line, and says on stdout what was left.

python worker.py FOLDER [alone]     `alone`: it is in pid, mount and network namespaces of its own
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dying.scene import Death, Scene
from torchaos.harness.cli import cli
from torchaos.harness.undo.client import UndoError, heal_from_log

PR_SET_CHILD_SUBREAPER = 36


def main(folder: Path, alone: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if alone:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
        for place in (folder, Path("/dev/shm")):
            subprocess.run(["mount", "-t", "tmpfs", "dying", str(place)], check=True)
    keep = Path(os.environ["DYING_KEEP"])
    for number, line in enumerate(sys.stdin):
        family, at = json.loads(line)
        stage = folder / f"{os.getpid()}-{number}"
        told = Scene(stage, alone, recover).play(Death(family, tuple((p, n, tuple(who)) for p, n, who in at)))
        if told.leaks:
            kept = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=keep))
            shutil.copytree(stage, kept, symlinks=True, dirs_exist_ok=True)
            told.leaks.append(f"all of it is in {kept}")
        shutil.rmtree(stage)
        print(json.dumps(asdict(told)), flush=True)


def recover(stage: Path, env: dict[str, str]) -> list[str]:
    """What a user does after harness and reaper are both dead: `torchaos recover`."""
    if "recover" not in cli.commands:
        try:
            healed = [one for log in stage.rglob("undo/undo.jsonl") for one in heal_from_log(log.parent.parent)]
        except UndoError as error:
            return [str(error)]
        return [f"recovery: {one.record}: {one.reason}" for one in healed if not one.verified]
    command = [sys.executable, "-m", "torchaos.harness", "recover"]
    with open(stage / "console", "ab") as console:
        code = subprocess.run(command, cwd=stage, env=env, stdout=console, stderr=console, check=False).returncode
    return [] if code == 0 else [f"torchaos recover: exit code {code}"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), "alone" in sys.argv[2:])
