"""The manifests that the agent wrote at save time (agent/manifest.py): what was in memory, chunk by chunk.

A file is recognised by its path at save time, less what marks it as unfinished; if nothing was saved there, by its
inode, which a rename keeps; else, in a copy, by as many last parts of its path as fit.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchaos.harness.agent.hashing import CHUNK
from torchaos.harness.agent.manifest import FOLDER, VERSION
from torchaos.harness.contracts import UsageError
from torchaos.harness.machine.disk import born_ns
from torchaos.harness.record.history.checkpoints import final_path

from ..formats.table import may_hold_tensors

__all__ = ["CHUNK", "Manifests", "Saved", "Span"]


Digest = tuple[str | None, int | None]  # xxh3 in hex and CRC-32; None: it was not taken


@dataclass(frozen=True)
class Span:
    """A run of bytes that were in memory when they were saved, with a digest for each CHUNK of them."""

    offset: int
    length: int
    digests: tuple[Digest, ...]


@dataclass(frozen=True)
class Saved:
    """One file as one rank saved it."""

    path: str
    save: str  # what was saved: the file itself, or the folder that it is in
    size: int
    inode: tuple[int, int]
    spans: tuple[Span, ...]
    rest: str | None  # digest of all bytes between the spans
    at_s: float
    attempt: int
    raced: bool = False  # as soon as it was written, the file was not what was in memory

    def digest_at(self, offset: int) -> Digest:
        """Of the chunk that begins there."""
        for span in self.spans:
            place, odd = divmod(offset - span.offset, CHUNK)
            if not odd and 0 <= place < len(span.digests):
                return span.digests[place]
        return None, None


@dataclass
class Manifests:
    """All of one run. `lost`: what can't be told by them, in words."""

    saved: list[Saved] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _by_path: dict[str, Saved] = field(default_factory=dict)
    _by_stem: dict[str, Saved] = field(default_factory=dict)  # saved as step-2.tmp, to be step-2.pt
    _by_inode: dict[tuple[int, int], Saved] = field(default_factory=dict)
    _by_name: dict[str, list[Saved]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def load(cls, folder: Path) -> Manifests:
        """Of a run directory, or of a folder of manifests. Raises UsageError where there are none."""
        inner = folder / "agent" / FOLDER
        where = inner if inner.is_dir() else folder
        paths = sorted(where.glob("*.json"))
        if not paths:
            raise UsageError(
                f"{folder}: there are no manifests in it; give the directory of a run that saved something"
            )
        return cls.of(paths)

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Manifests:
        found = cls()
        for path in paths:
            try:
                raw = json.loads(path.read_text())
                if raw["version"] != VERSION:
                    raise ValueError(f"version {raw['version']} is not known")
                found.saved += [_saved(raw, one) for one in raw["files"]]
                found.lost += [str(text) for text in raw.get("lost", ())]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                found.lost.append(f"{path.name} can't be read: {error}")
        found.saved.sort(key=lambda one: one.at_s)
        for one in found.saved:
            final = final_path(one.path)
            found._by_path[final] = one
            if final != one.path and not posixpath.splitext(final)[1]:
                found._by_stem[final] = one
            found._by_inode[one.inode] = one
            found._by_name[posixpath.basename(final_path(one.path))].append(one)
        return found

    def of_file(self, path: str, size: int) -> Saved | None:
        """What was saved as this file, if that is known."""
        wanted = final_path(path)
        exact = self._by_path.get(wanted) or self._by_stem.get(posixpath.splitext(wanted)[0])
        if exact:
            return exact
        try:
            stat = os.stat(path)
        except OSError:
            stat = None
        same = self._by_inode.get((stat.st_dev, stat.st_ino)) if stat else None
        if same and same.size == size and may_hold_tensors(path) and born_ns(Path(path)) <= 1e9 * same.at_s:
            return same  # born later, it is another file: an inode is used again
        return self._of_copy(wanted)

    def _of_copy(self, wanted: str) -> Saved | None:
        """By the last parts of its path: name and folder, or the name where only one path had it and is gone."""
        near = self._by_name.get(posixpath.basename(wanted), [])
        best = max(near, key=lambda one: (_shared(wanted, final_path(one.path)), one.at_s), default=None)
        if best is None or _shared(wanted, final_path(best.path)) >= 2:
            return best
        moved = len({one.path for one in near}) == 1 and not os.path.exists(best.path)
        return best if moved and best.save == best.path else None

    def expected(self, checkpoint: str) -> list[Saved]:
        """What was saved in this folder in the last attempt that saved there, of each path the newest."""
        start = final_path(checkpoint) + "/"
        found = [one for path, one in self._by_path.items() if path.startswith(start)]
        last = max((one.attempt for one in found), default=0)
        return [one for one in found if one.attempt == last]

    def others(self, saved: Saved) -> list[Saved]:
        """Other saves of files of the same size, and of the same name but for numbers."""
        return [one for one in self.saved if one is not saved and one.size == saved.size and _kin(one) == _kin(saved)]


def _kin(saved: Saved) -> str:
    return re.sub(r"\d+", "#", posixpath.basename(final_path(saved.path)))


def _saved(manifest: Mapping[str, Any], raw: Mapping[str, Any]) -> Saved:
    kind = str(raw.get("algorithm", manifest["algorithm"]))
    spans = tuple(Span(int(offset), int(length), _digests(text, kind)) for offset, length, text in raw["spans"])
    return Saved(
        str(raw["path"]), str(manifest["save"]), int(raw["size"]), (int(raw["dev"]), int(raw["ino"])), spans,
        raw.get("rest"), float(manifest["wall_s"]), int(manifest["attempt"]),
        bool(raw.get("raced")),
    )  # fmt: skip


def _digests(text: str, kind: str) -> tuple[Digest, ...]:
    first, width = {"xxh3+crc32": (16, 24), "xxh3": (16, 16), "crc32": (0, 8)}[kind]
    parts = [text[at : at + width] for at in range(0, len(text), width)]
    return tuple((part[:first] or None, int(part[first:], 16) if part[first:] else None) for part in parts)


def _shared(one: str, other: str) -> int:
    """How many last parts two paths have in common."""
    pairs = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), 1 << 20)
