"""Plays one death after another: reads deaths from stdin, one JSON array per line, and writes what was left to stdout.

python worker.py FOLDER [alone]     `alone`: it has its own pid, mount and network namespaces
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dying import clean
from dying.scene import Aftermath, Death, Scene

PR_SET_CHILD_SUBREAPER = 36
_COPIED = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


def main(folder: Path, alone: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if alone:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
        for place in (folder, Path("/dev/shm")):
            subprocess.run(["mount", "-t", "tmpfs", "dying", str(place)], check=True)
    keep = Path(os.environ["DYING_KEEP"])
    for number, line in enumerate(sys.stdin):
        family, at = json.loads(line)
        death = Death(family, tuple((point, nth, tuple(who)) for point, nth, who in at))
        aftermath = die(folder / f"{os.getpid()}-{number}", alone, death, keep)
        print(json.dumps(asdict(aftermath)), flush=True)


def die(stage: Path, alone: bool, death: Death, keep: Path) -> Aftermath:
    """Play a death. An error in here is reported as a leak too, because then nobody has checked the machine."""
    aftermath = Aftermath(died=False)
    try:
        aftermath = Scene(stage, alone, recover).play(death)
        if aftermath.leaks:
            kept = Path(tempfile.mkdtemp(prefix=f"{death.family}-", dir=keep))
            shutil.copytree(stage, kept, symlinks=True, dirs_exist_ok=True, ignore=_no_files)
            aftermath.leaks.append(f"all of it is in {kept}")
        shutil.rmtree(stage)
    except Exception as error:
        aftermath.leaks += [f"the campaign itself failed: {error!r:.500}", *clean.unmount_all(stage)]
        shutil.rmtree(stage, ignore_errors=True)
    return aftermath


def _no_files(folder: str, names: list[str]) -> list[str]:
    """For shutil.copytree: sockets and fifos, which can't be copied."""
    return [name for name in names if stat.S_IFMT(os.lstat(os.path.join(folder, name)).st_mode) not in _COPIED]


def recover(stage: Path, env: dict[str, str]) -> list[str]:
    """Run `torchaos recover`, as a user does when harness and reaper are both dead."""
    command = [sys.executable, "-m", "torchaos.harness", "recover"]
    with open(stage / "console", "ab") as console:
        code = subprocess.run(command, cwd=stage, env=env, stdout=console, stderr=console, check=False).returncode
    return [] if code == 0 else [f"torchaos recover: exit code {code}"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), "alone" in sys.argv[2:])
