"""The rules for a folder that storage_fs.py serves, as data. Injectors write the rules, and storage_fs.py carries them
out."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torchaos.harness.protocol.rank_files import THREAD

READS = frozenset({"open_read", "read", "readdir", "readlink"})
LOOKS = frozenset({"getattr", "statfs"})
WRITES = frozenset({
    "open_write", "create", "write", "truncate", "mkdir", "rename", "unlink", "rmdir", "link", "symlink", "chmod",
    "chown", "utimens",
})  # fmt: skip
SYNCS = frozenset({"fsync", "fsyncdir"})
GROWS = frozenset({"create", "write", "mkdir", "symlink"})  # operations that need space


def operations(on: str) -> tuple[str, ...]:
    """The operations that the parameter `on` selects: reads, writes, both, or all (reads, writes, getattr and
    statfs)."""
    groups = {"reads": READS, "writes": WRITES | SYNCS, "both": READS | WRITES | SYNCS}
    return tuple(sorted(groups.get(on, groups["both"] | LOOKS)))


@dataclass(frozen=True)
class Rules:
    """The `operations` of the ranks `ranks` fail with `error`, take `delay_s` seconds longer, or (`stall`) hang until
    the fault is undone. `left`: only operations that need space fail, after this many bytes have been written. `rate`:
    bytes per second."""

    operations: tuple[str, ...]
    ranks: tuple[int, ...]
    error: str | None = None  # a name of errno
    delay_s: float = 0.0
    rate: float | None = None
    stall: bool = False
    left: int | None = None

    @property
    def number(self) -> int:
        return int(getattr(errno, self.error or "EIO"))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rules:
        raw = json.loads(text)
        return cls(**{**raw, "operations": tuple(raw["operations"]), "ranks": tuple(raw["ranks"])})


def rank_of(pid: int) -> int | None:
    """The rank to which a thread belongs: a thread of the rank's process or of its child processes. None for all other
    threads, and for the agent's threads that read saved files, because errors there prove nothing about the job."""
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() == THREAD:
            return None
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    known = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry)
    rank = known.get(b"RANK", b"")
    return int(rank) if b"TORCHELASTIC_RUN_ID" in known and rank.isdigit() else None
