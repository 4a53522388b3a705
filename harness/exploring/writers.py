"""Finds which ranks write to the checkpoint folder, and copies the stamps of the collectives that these ranks run
meanwhile."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from torchaos.harness.agent.stamps import read_stamps
from torchaos.harness.agent.wire import ENV_PLAN
from torchaos.harness.mechanics.storage.rules import rank_of

_KNOWN_S = 1.0  # seconds for which a thread number is known; later it may be used by another thread
_PERIOD_S = 0.01
_COUNT_AT = 48  # offset of the number of collectives so far, in a file of stamps


@dataclass(frozen=True)
class Writer:
    rank: int | None
    pid: int


class Writers:
    """Finds the process and the rank of a thread. From a rank's first operation on, its collectives are copied from the
    agent's stamps to the file `to`, before the stamps wrap around. `plans` gets the path of each agent's plan."""

    def __init__(self, to: Path, plans: Path) -> None:
        self._to = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._said = plans
        self._known: dict[int, tuple[float, Writer]] = {}
        self._folders: set[Path] = set()  # folders of stamps
        self._copied: dict[Path, int] = {}  # how many collectives of each file are copied
        self._looked: set[int] = set()  # pids whose plan was searched for
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stamps", daemon=True)
        self._thread.start()

    def of(self, tid: int) -> Writer:
        now = time.monotonic()
        since, writer = self._known.get(tid, (0.0, None))
        if writer is None or now - since > _KNOWN_S:
            writer = Writer(rank_of(tid), _process_of(tid))
            self._known[tid] = (now, writer)
            if writer.rank is not None and writer.pid not in self._looked:
                self._looked.add(writer.pid)
                self._find_plan(writer.pid)
        return writer

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._copy_all()

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self._copy_all()

    def _find_plan(self, pid: int) -> None:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return
        plan = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry).get(ENV_PLAN.encode())
        if plan and (folder := Path(os.fsdecode(plan)).parent / "stamps") not in self._folders:
            self._folders.add(folder)
            with open(self._said, "ab") as file:
                file.write(plan + b"\n")

    def _copy_all(self) -> None:
        for path in [path for folder in list(self._folders) for path in folder.glob("*.stamps")]:
            copied = self._copied.get(path, 0)
            try:
                with open(path, "rb") as file:
                    head = file.read(_COUNT_AT + 8)
                if struct.unpack_from("q", head, _COUNT_AT)[0] == copied:
                    continue
                stamps = [stamp for stamp in read_stamps(path) if stamp.number > copied]
            except (OSError, ValueError, struct.error):
                continue
            for stamp in stamps:
                os.write(self._to, json.dumps(asdict(stamp)).encode() + b"\n")
            self._copied[path] = max((stamp.number for stamp in stamps), default=copied)


def _process_of(tid: int) -> int:
    try:
        with open(f"/proc/{tid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))
    except (OSError, StopIteration):
        return tid
