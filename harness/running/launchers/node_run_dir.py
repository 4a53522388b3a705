"""The run directory of a node that shares no folder with the controller. The plans are sent to the node through a pipe
before the job starts. At the end of the job, the node's agent sends back what the node wrote."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import IO

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.rundir import RunDir

_SENT = ("agent/manifests", "agent/reads", "agent/stamps", "logs")
_PIECE = 1 << 18
PATIENCE_S = 900.0  # seconds that a node waits for the others, which may still get machines and images


def is_made(folder: RunDir) -> bool:
    """Whether the run directory is complete. The agent's plan is written last. Raises UsageError if the directory, or
    the path to the plan, belongs to another user or is a link, because in a shared folder other users could then choose
    what the ranks read."""
    for path in (folder.root, folder.agent_plan.parent, folder.agent_plan):
        try:
            folder.own(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def packed(root: Path, node: int, hosts: Sequence[str], submission: int = 0, base: int = 0) -> bytes:
    """The data that a node needs: its number, the names or addresses of all nodes, the number of attempts before this
    submission, the plans, and the folder of torchaos's injectors on this machine."""
    run = RunDir(root)
    plans = {"plan": run.plan.read_text(), "agent_plan": run.agent_plan.read_text()}
    attempts = {"submission": submission, "base": base}
    return json.dumps({"node": node, "hosts": hosts, "injectors": _injectors(), **attempts, **plans}).encode()


def receive(root: Path, given: IO[bytes]) -> bool:
    """Makes the run directory of this node from the data of `packed`, unless the node sees the controller's run
    directory. Returns whether it sees that. Raises UsageError if the directory can't be made, or if an injector of the
    plan is not on this machine."""
    said, run = json.loads(given.read()), RunDir(root)
    shared = is_made(run)
    if not shared:
        run.create(finish=True)
        plan, agent_plan = (_of_this_machine(said[name], said["injectors"]) for name in ("plan", "agent_plan"))
        missing = [fault["source"] for fault in json.loads(plan)["faults"] if not Path(fault["source"]).is_file()]
        if missing:
            raise UsageError(f"{missing[0]}: this injector is not on the node; install its package in the image")
        run.plan.write_text(plan)
        base = base_file(root, said["submission"])
        base.parent.mkdir(mode=0o700)
        base.write_text(str(said["base"]))
        _write(run.agent_plan, agent_plan)
    _write(_place(run, said["submission"]), json.dumps({"node": said["node"], "hosts": said["hosts"]}))
    return shared


def base_file(root: Path, submission: int) -> Path:
    """The file with the number of attempts before a submission."""
    return root / "clock" / f"base-{submission}"


def await_place(root: Path, submission: int, wait_s: float) -> tuple[int, list[str]]:
    """Waits for the number of this node in a submission, and the names of all nodes, from the controller. Raises
    UsageError after `wait_s` seconds, and if the node has had them before: an operator may start a container again,
    which must not start the job again."""
    place, end = _place(RunDir(root), submission), time.monotonic() + wait_s
    taken = place.with_suffix(".taken")
    while not place.exists():
        if taken.exists():
            raise UsageError(f"{root}: this container was started again; the job's part on this node is over")
        if time.monotonic() > end:
            raise UsageError(f"{root}: the controller did not hand over the run within {wait_s:g} s")
        time.sleep(0.1)
    os.replace(place, taken)
    said = json.loads(taken.read_text())
    return int(said["node"]), list(said["hosts"])


def files_to_send(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the files that a node wrote into its run directory, in pieces of at most _PIECE bytes: (path in the run
    directory, next bytes of that file). Events are left out, because they are sent at once."""
    for folder in _SENT:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and not path.is_symlink():
                with open(path, "rb") as file:
                    while piece := file.read(_PIECE):
                        yield str(path.relative_to(root)), piece


def append(root: Path, name: str, piece: bytes) -> None:
    """Appends bytes to a file in the run directory. Raises ValueError if a node may not write a file of that name."""
    path = PurePosixPath(name)
    if ".." in path.parts or not any(path.is_relative_to(folder) for folder in (*_SENT, "events")):
        raise ValueError(f"{name}: a node does not write this file")
    target = root / path
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(target, "ab", opener=lambda at, flags: os.open(at, flags, 0o600)) as file:
        file.write(piece)


def _of_this_machine(plan: str, injectors: str) -> str:
    """The plan with the paths of torchaos's injectors on this machine."""
    return plan.replace(json.dumps(injectors)[1:-1], json.dumps(_injectors())[1:-1])


def _place(run: RunDir, submission: int) -> Path:
    """The file that contains the number of this node. Each node that shares the folder has its own file for each
    submission: new pods have the names of the pods before, and other addresses."""
    return run.agent_plan.with_name(f"node-{os.uname().nodename}-{submission}.json")


def _write(path: Path, text: str) -> None:
    """Writes the whole file at once, because a process may wait for it."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    os.replace(partial, path)


def _injectors() -> str:
    return str(files("torchaos.injectors"))
