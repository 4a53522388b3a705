"""The manifests that the agent wrote during saves (protocol/wire.py): digests, chunk by chunk, of the bytes in memory.

A file's manifest is found by the path at which it was saved, without marks such as `.tmp`; the newest save to that path
counts. If no file was saved under that path, the manifest is found by the file's inode, which a rename keeps. The
manifest of a copy is found by the last parts of the path.

A newer save may never have got its final name. So if the inodes of all files of a checkpoint are those of one earlier
save, the files are of that save. And a newer save whose file still has its unfinished name does not count for a file
that is older than it."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchaos.harness.host.disk import born_ns
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import CHUNK, MANIFEST_VERSION, MANIFESTS
from torchaos.harness.record.checkpoint_names import final_path

from ..formats.format_table import may_hold_tensors

__all__ = ["CHUNK", "Manifests", "Saved", "Span"]


Digest = tuple[str | None, int | None]  # xxh3 in hex and CRC-32; None: not computed


@dataclass(frozen=True)
class Span:
    """A sequence of bytes that were in memory when they were saved, with a digest for each CHUNK bytes."""

    offset: int
    length: int
    digests: tuple[Digest, ...]


@dataclass(frozen=True)
class Saved:
    """One file as one rank saved it."""

    path: str
    save: str  # the path that was saved: this file, or its folder
    size: int
    inode: tuple[int, int]
    spans: tuple[Span, ...]
    rest: str | None  # digest of all bytes outside the spans
    at_s: float
    attempt: int
    raced: bool = False  # right after it was written, the file differed from the memory
    number: int = 0  # how many saves of the same attempt wrote to this path before

    @property
    def has_digests(self) -> bool:
        """Whether the process that saved the file lived long enough to write the digests."""
        return bool(self.spans or self.rest)

    def digest_at(self, offset: int) -> Digest:
        """The digest of the chunk that begins at this offset of the file, in bytes."""
        for span in self.spans:
            place, odd = divmod(offset - span.offset, CHUNK)
            if not odd and 0 <= place < len(span.digests):
                return span.digests[place]
        return None, None


@dataclass
class Manifests:
    """All manifests of one run. `lost`: sentences about saved data without a digest."""

    saved: list[Saved] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _by_path: dict[str, list[Saved]] = field(default_factory=lambda: defaultdict(list))
    _by_stem: dict[str, list[Saved]] = field(default_factory=lambda: defaultdict(list))  # step-2.tmp for step-2.pt
    _by_inode: dict[tuple[int, int], Saved] = field(default_factory=dict)
    _by_place: dict[tuple[str, int], Saved] = field(default_factory=dict)  # by folder and inode
    _by_name: dict[str, list[Saved]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def load(cls, folder: Path) -> Manifests:
        """The manifests of a run directory, or of a folder of manifests. Raises UsageError if there are none."""
        inner = folder / "agent" / MANIFESTS
        where = inner if inner.is_dir() else folder
        paths = sorted(where.glob("*.json"))
        if not paths:
            raise UsageError(
                f"{folder}: there are no manifests in it; give the directory of a run that saved something"
            )
        return cls.of(paths)

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Manifests:
        manifests = cls()
        for path in paths:
            try:
                raw = json.loads(path.read_text())
                if raw["version"] != MANIFEST_VERSION:
                    raise ValueError(f"version {raw['version']} is not known")
                manifests.saved += [_saved(raw, file) for file in raw["files"]]
                manifests.lost += [str(text) for text in raw.get("lost", ())]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                manifests.lost.append(f"{path.name} can't be read: {error}")
        manifests.saved = _numbered(manifests.saved)
        for saved in manifests.saved:
            final = final_path(saved.path)
            manifests._by_path[final].append(saved)
            if final != saved.path and not posixpath.splitext(final)[1]:
                manifests._by_stem[final].append(saved)
            manifests._by_inode[saved.inode] = saved
            manifests._by_place[posixpath.dirname(saved.path), saved.inode[1]] = saved
            manifests._by_name[posixpath.basename(final_path(saved.path))].append(saved)
        return manifests

    def of_files(self, sizes: Mapping[str, int]) -> dict[str, Saved]:
        """The saves of the files of one checkpoint, without unknown files. `sizes`: in bytes, by path."""
        newest = {path: saved for path, size in sizes.items() if (saved := self._of_file(path, size))}
        by_inode = {path: saved for path in newest if (saved := self._same_inode(path)) and _is_name(saved.path, path)}
        one_save = by_inode.keys() == newest.keys() and len(set(map(_round, by_inode.values()))) == 1
        return by_inode if one_save else newest

    def _of_file(self, path: str, size: int) -> Saved | None:
        wanted = final_path(path)
        if saves := self._by_path.get(wanted) or self._by_stem.get(posixpath.splitext(wanted)[0]):
            return next((saved for saved in reversed(saves) if not self._is_younger(saved, path)), saves[-1])
        same = self._same_inode(path)
        return same if same and same.size == size and may_hold_tensors(path) else self._of_copy(wanted)

    def _same_inode(self, path: str) -> Saved | None:
        """The newest save into the inode that is at this path now. Device numbers are not compared in the folder of the
        save: a FUSE file system that covered the folder during the run was another device."""
        try:
            stat = os.stat(path)
        except OSError:
            return None
        in_place = self._by_place.get((posixpath.dirname(path), stat.st_ino))
        same = self._by_inode.get((stat.st_dev, stat.st_ino)) or in_place
        # A file that was made after its manifest is another file, which got a used inode number.
        return same if same and born_ns(Path(path)) <= 1e9 * same.at_s else None

    def _is_younger(self, saved: Saved, path: str) -> bool:
        """Whether the saved file still has its unfinished name, and was made after the last change of the file at this
        path. Then the file at this path is neither that save nor a copy of it."""
        if saved.path == path or self._same_inode(saved.path) is not saved:
            return False
        try:
            return os.stat(path).st_mtime_ns < born_ns(Path(saved.path))
        except OSError:
            return False

    def _of_copy(self, wanted: str) -> Saved | None:
        """Finds a copy by the last parts of its path: by file name and folder. If only one path had that file name and
        the original is gone, the file name is enough."""
        near = self._by_name.get(posixpath.basename(wanted), [])
        best = max(near, key=lambda saved: (_shared(wanted, final_path(saved.path)), saved.at_s), default=None)
        if best is None or _shared(wanted, final_path(best.path)) >= 2:
            return best
        moved = len({saved.path for saved in near}) == 1 and not os.path.exists(best.path)
        return best if moved and best.save == best.path else None

    def knows(self, path: str, saved: Saved) -> bool:
        """Whether the file at this path is certainly the saved file, and not perhaps a copy of an earlier save."""
        wanted = final_path(path)
        same_path = wanted in self._by_path or posixpath.splitext(wanted)[0] in self._by_stem
        return same_path or self._same_inode(path) is saved

    def expected(self, checkpoint: str, known: Iterable[Saved]) -> list[Saved]:
        """The files that this folder should hold. `known`: the saves whose files were recognised there.

        If one of these saves is older than the newest save of its path, the folder is of that earlier save: all files
        of that save. Otherwise: for each path, its newest save, if it is of the last attempt that saved here."""
        start = final_path(checkpoint) + "/"
        inside = [saves for path, saves in self._by_path.items() if path.startswith(start)]
        earlier = {_round(saved) for saved in known if self._by_path[final_path(saved.path)][-1] is not saved}
        if earlier:
            return [saved for saves in inside for saved in saves if _round(saved) in earlier]
        last = max((saves[-1].attempt for saves in inside), default=0)
        return [saves[-1] for saves in inside if saves[-1].attempt == last]

    def others(self, saved: Saved) -> list[Saved]:
        """Other saves of files with the same size, and the same name except for numbers."""
        same_size = (one for one in self.saved if one is not saved and one.size == saved.size and one.has_digests)
        return [other for other in same_size if _kin(other) == _kin(saved)]


def _numbered(saved: Iterable[Saved]) -> list[Saved]:
    """All saves in order of time, each with its number."""
    before: dict[tuple[int, str], int] = defaultdict(int)
    found = []
    for save in sorted(saved, key=lambda save: save.at_s):
        found.append(replace(save, number=before[save.attempt, final_path(save.path)]))
        before[save.attempt, final_path(save.path)] += 1
    return found


def _is_name(saved: str, path: str) -> bool:
    """Whether `path` is the final path of a file that was saved as `saved`: without the mark of an unfinished file, or
    with another suffix in place of this mark (`last.pt` for `last.tmp`)."""
    final, wanted = final_path(saved), final_path(path)
    return final == wanted or (final != saved and final == posixpath.splitext(wanted)[0])


def _round(saved: Saved) -> tuple[int, int]:
    """A key that is equal for all files of one save to a folder."""
    return saved.attempt, saved.number


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


def _shared(path: str, other: str) -> int:
    """The number of last parts that two paths have in common."""
    pairs = zip(reversed(path.split("/")), reversed(other.split("/")), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), 1 << 20)
