"""Checks that everything of a dead run is gone from the machine. The checks return a sentence for each leak."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dying.stand_in.checkpoint import checkpoint
from torchaos.harness.host import processes as proc
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.rollback import undo_log as log
from torchaos.harness.rollback.file_handles import mounts

SETTLED_S = 3.0  # seconds after which short-lived files of other processes are gone

Tree = dict[str, tuple[int, int, str]]
_OURS = re.compile("torchaos.*(first|second)")  # names that our families' faults give, since other runs may be going on
_TORCHS_OWN = ("torchelastic_", "torchinductor_")  # torch always leaves these in the temporary folder


def processes(mark: str | None, but: set[int]) -> dict[int, str]:
    """Living processes and their descriptions: with the mark in their environment, or (None) all that /proc shows."""
    living = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        seen, image = proc.stat(pid), proc.image(pid)
        if pid in but or seen is None or seen.state in "ZX":
            continue
        if mark is None or (image and mark.encode() in image[1].split(b"\0")):
            line = image[0].replace(b"\0", b" ").decode(errors="replace")[:120] if image else ""
            living[pid] = f"process {pid} in state {seen.state}: {line}"
    return living


def tree(folder: Path) -> Tree:
    """Mode, time of change and digest of every file below the folder."""
    files: Tree = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        files[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns if digest else 0, digest)
    return files


def differences(before: Tree, after: Tree) -> list[str]:
    return [f"file {name}: not as it was" for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)]  # fmt: skip


class Machine:
    """The state before the runs: mounts, network devices and rules, cgroups, shared memory and temporary files."""

    def __init__(self, temporary: Path, alone: bool) -> None:
        self._temporary, self._alone = temporary, alone
        self._before = dict(self._look())

    def left(self) -> list[str]:
        end = time.monotonic() + SETTLED_S
        while (found := self._left_now()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _left_now(self) -> list[str]:
        after = dict(self._look())
        return [f"{what}: {thing}" for what in after for thing in sorted(after[what] - self._before[what])]

    def _look(self) -> Iterator[tuple[str, set[str]]]:
        if self._alone:  # in our own namespaces, only our runs make any
            yield "mount", set(Path("/proc/self/mountinfo").read_text().splitlines())
            yield "network device", {line.partition(":")[0] for line in _lines("/proc/net/dev")}
            yield "shared memory", set(os.listdir("/dev/shm"))
            yield "rule", _rules()
        yield "network namespace", {name for name in _names("/run/netns") if _OURS.search(name)}
        yield "cgroup", {folder for folder in _cgroups() if _OURS.search(folder) and not _of_others(folder)}
        yield "temporary file", {name for name in os.listdir(self._temporary) if not name.startswith(_TORCHS_OWN)}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _rules() -> set[str]:
    if not shutil.which("nft"):
        return set()
    done = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=False)
    return set(done.stdout.splitlines())


def _of_others(cgroup: str) -> bool:
    """Whether the cgroup belongs to a run beside this one: a process of another pid namespace reads as 0."""
    try:
        return "0" in Path(cgroup, "cgroup.procs").read_text().split()
    except OSError:  # gone meanwhile
        return True


def _cgroups() -> Iterator[str]:
    for root, _folders, _files in os.walk("/sys/fs/cgroup"):
        yield root


def unmount_all(stage: Path) -> list[str]:
    """Unmount everything below `stage`, so that a leak of one death does not disturb the next. Returns the problems."""
    problems = []
    for target in reversed([mount.target for mount in mounts() if Path(mount.target).is_relative_to(stage)]):
        done = subprocess.run(["umount", "-l", target], capture_output=True, text=True, check=False)
        problems += [f"mount that can't be unmounted: {done.stderr.strip()}"] if done.returncode else []
    return problems


def undo_log(run_dir: Path) -> list[str]:
    """Check that every record was undone and verified, and that no control page lets a rank fire."""
    problems = []
    if log.path_of(run_dir).exists():
        records, damaged = log.read(run_dir)
        problems += [f"undo record {record.id}: {record.state.value}" for record in records if record.open]
        problems += [f"undo log: line {number} can't be read" for number in damaged]
    for path in sorted((run_dir / "agent" / "pages").glob("*.page")):
        with suppress(ValueError):  # an incomplete page, which no agent uses
            page = ControlPage(path)
            if page.read(ControlPage.ALLOWED) > page.read(ControlPage.FIRED):
                problems.append(f"control page {path.name}: still armed")
            page.close()
    return problems


def journals(run_dir: Path) -> list[str]:
    """Check that every line of the journal can be read, except a torn last line."""
    problems = []
    for path in sorted((run_dir / "events").glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                Event.from_line(line + b"\n")
            except ValueError:
                problems.append(f"{path.name}:{number}: not an event")
    return problems


def checkpoints(run_dir: Path, kept: bool) -> list[str]:
    """Check that no checkpoint is missing and that each is as the job saved it, to the byte. Checkpoints in memory (not
    `kept`) may be lost with the harness."""
    folder, problems = run_dir / "checkpoints", []
    for path in folder.glob("step-*.safetensors"):  # of a stand-in
        if path.read_bytes() != checkpoint(int(path.stem[5:])):
            problems.append(f"checkpoint {path.name}: not as it was saved")
    for manifest in folder.glob("step-*[0-9]/manifest.json"):  # of a real job, which keeps digests of what it saves
        for name, digest in json.loads(manifest.read_bytes())["files"].items():
            file = manifest.with_name(name)
            if not file.exists() or hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() != digest:
                problems.append(f"checkpoint {manifest.parent.name}: {name} is not as it was saved")
    problems += [f"checkpoint folder: {path.name} in it is ours" for path in folder.rglob("*torchaos*")]
    saved = _saved(run_dir) if kept else []
    missing = {path for path in saved if path.suffix == ".safetensors" and not path.exists()}
    return problems + [f"checkpoint {path.name}: gone" for path in sorted(missing)]


def _saved(run_dir: Path) -> Iterator[Path]:
    """The checkpoints that the job reported as saved."""
    for path in (run_dir / "events").glob("rank*.jsonl"):
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError, KeyError):
                event = json.loads(line)
                if event["kind"] == Kind.SAVE_END.value and event["data"]["ok"]:
                    yield Path(event["data"]["path"])
