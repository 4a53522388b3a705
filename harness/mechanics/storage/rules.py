"""What goes wrong in a served folder, as data: the injectors write it, the server carries it out."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torchaos.harness.agent.helper import THREAD

READS = frozenset({"open_read", "read", "readdir", "readlink"})
LOOKS = frozenset({"getattr", "statfs"})
WRITES = frozenset({
    "open_write", "create", "write", "truncate", "mkdir", "rename", "unlink", "rmdir", "link", "symlink", "chmod",
    "chown", "utimens",
})  # fmt: skip
SYNCS = frozenset({"fsync", "fsyncdir"})
GROWS = frozenset({"create", "write", "mkdir", "symlink"})  # what needs space


def operations(on: str) -> tuple[str, ...]:
    """`on`: reads, writes, both, or all, which is also asking what is there."""
    some = {"reads": READS, "writes": WRITES | SYNCS, "both": READS | WRITES | SYNCS}
    return tuple(sorted(some.get(on, some["both"] | LOOKS)))


@dataclass(frozen=True)
class Rules:
    """`operations` of the ranks `ranks` fail with `error`, take `delay_s` longer, or hang until it is taken back.
    `left`: not before so many bytes more have been written. `rate`: bytes per second that get through."""

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
    """The rank whose process, or whose child, a thread belongs to; None for everybody else, and for the threads with
    which the agent reads what was saved: what befalls them shows nothing of the job."""
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() == THREAD:
            return None
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    known = dict(entry.split(b"=", 1) for entry in environment if b"=" in entry)
    rank = known.get(b"RANK", b"")
    return int(rank) if b"TORCHELASTIC_RUN_ID" in known and rank.isdigit() else None
