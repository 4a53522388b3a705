"""The base class of most `storage.*` injectors: mounts the file system of storage_fs.py over the checkpoint folder.
Only files that are opened while the fault is on go through it. Files that the job writes meanwhile are in the folder
below, and are visible afterwards."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torchaos.harness.agent.rank_faults import Fault
from torchaos.harness.agent.wire import Kind
from torchaos.harness.fault_drivers.storage.fs_rules import Rules
from torchaos.harness.interfaces import ChaosError, Emit, Evidence, Handle, NodeSite, Target, Where
from torchaos.harness.rollback.file_handles import File, Mount, mounts

if TYPE_CHECKING:
    from torchaos.harness.record.record import Record

Self = TypeVar("Self")
MOUNT_S = 8.0  # seconds; less than a rank is held
_ON = b"on\n"


class StorageFault(Fault):
    """A fault of the file system that holds the checkpoints. It hits the ranks of the target."""

    where: ClassVar[tuple[Where, ...]] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset({"fuse"})
    late: ClassVar[bool] = True

    ranks: tuple[int, ...]

    def rules(self) -> Rules:
        raise NotImplementedError

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        return replace(self, ranks=target.ranks)  # type: ignore[type-var]

    def changes(self, site: NodeSite) -> Sequence[Handle]:
        """The handles of the mount, and of the file that switches the failures on. Undo first ends the failures, and
        then unmounts the folder, even while it is in use."""
        folder = _folder(site)
        switch = File.of(_switch(site), site.undo_copies, site.undo_copies, hashlib.sha256(_ON).hexdigest())
        return [Mount.of(folder, _tag(site)), switch]

    def apply(self, site: NodeSite) -> None:
        """Mounts the file system. Raises ChaosError if that is not possible."""
        folder, log = _folder(site), _log(site)
        _switch(site).write_bytes(_ON)
        module = f"{__package__}.storage_fs"
        argv = [sys.executable, "-m", module, str(folder), _tag(site), str(_switch(site)), str(log)]
        with open(log.with_suffix(".out"), "wb") as output:
            server = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd="/", start_new_session=True
            )
        assert server.stdin is not None
        server.stdin.write(self.rules().to_json().encode())
        server.stdin.close()
        end = time.monotonic() + MOUNT_S
        while not any(mount.source == _tag(site) for mount in mounts()):
            if server.poll() is not None or time.monotonic() > end:
                lines = log.with_suffix(".out").read_text(errors="replace").strip().splitlines()
                raise ChaosError(
                    f"{folder} could not be covered by FUSE: {lines[-1] if lines else 'no reason was given'}"
                )
            time.sleep(0.005)

    def probes(self, site: NodeSite) -> Sequence[Spoilt]:
        return [Spoilt(site.fault, _log(site))]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence that a target rank got an error or had to wait. The witness is the file system, which is not in the
        rank. One target rank is enough, because it may keep the other ranks from getting to their operations."""
        seen = [event for event in record.of_fault(fault, Kind.EFFECT) if event.data.get("what") == "spoilt"]
        last = {event.data["rank"]: event for event in seen}
        if not last:
            return None
        effects = "; ".join(str(event.data["effect"]) for _rank, event in sorted(last.items()))
        return Evidence.of(effects, *last.values())


@dataclass
class Spoilt:
    """A probe that reads the server's log, and reports the errors and delays of each rank."""

    fault: str
    log: Path
    period_s: float = 0.2
    _offset: int = 0
    _counts: dict[int, Counter[str]] = field(default_factory=dict)

    def sample(self, emit: Emit) -> None:
        new: set[int] = set()
        for line in self._lines():
            rank = int(line["rank"])
            new.add(rank)
            effect = f"{line['what']} at {line['operation'].replace('_', ' for ')}"
            self._counts.setdefault(rank, Counter())[effect] += 1
        for rank in sorted(new):
            gifts = ", ".join(f"{count} × {effect}" for effect, count in self._counts[rank].most_common(4))
            data = {"fault": self.fault, "what": "spoilt", "rank": rank, "effect": f"rank {rank} was given {gifts}"}
            emit(Kind.EFFECT, data)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            with open(self.log, "rb") as file:
                file.seek(self._offset)
                whole, newline, _torn = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


def _folder(site: NodeSite) -> Path:
    folder = site.checkpoints
    if folder is None:
        raise ChaosError("the scenario does not give the folder of the checkpoints; write job.checkpoints.path")
    if not folder.is_dir():
        raise ChaosError(f"{folder}: there is no such folder yet, so nothing can be mounted over it")
    return folder.resolve()


def _tag(site: NodeSite) -> str:
    """The name of the mount, made from the run's folder and the fault. No other mount has this name."""
    return f"torchaos-{site.undo_copies.resolve().parent.name}-{site.fault}".replace(",", "_")


def _switch(site: NodeSite) -> Path:
    return site.undo_copies.resolve() / f"{site.fault}.on"


def _log(site: NodeSite) -> Path:
    return site.undo_copies.resolve() / f"{site.fault}.log"
