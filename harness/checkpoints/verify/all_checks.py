"""All checks of one checkpoint, and their result: problems that name the tensor, the element and the byte, or else the
part of the file."""

from __future__ import annotations

import posixpath
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from xxhash import xxh3_64_hexdigest

from torchaos.harness.record.result import ExitCode

from .. import formats
from ..files import Files
from ..formats import format, format_table
from ..formats.format import UNKNOWN_LAYOUT
from ..layout import Checkpoint, Checksum, Problem, Shard, TensorEntry, Trouble
from ..zip_records import locate
from .chains import chain
from .manifests import Manifests, Saved
from .stream import BadChunk, Found, Nans, Stream, rest_differs, windows

_NESTED = 64  # how many tensors before an offset are checked, because views of one storage may overlap the place


@dataclass(frozen=True)
class Place:
    """The place of a byte. `element`: the index of its element in the whole tensor. None if the byte belongs to no
    tensor."""

    text: str
    tensor: str | None = None
    element: tuple[int, ...] | None = None
    byte: int = 0  # which byte of that element


class Places:
    def __init__(self, found: Checkpoint) -> None:
        self._shards: dict[str, list[tuple[int, int, TensorEntry, Shard]]] = defaultdict(list)
        for tensor in found.tensors.values():
            for shard in tensor.shards:
                extent = shard.extent
                self._shards[extent.file].append((extent.offset, extent.end, tensor, shard))
        for shards in self._shards.values():
            shards.sort(key=lambda entry: entry[:2])
        self._records: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for checksum in found.checksums:
            self._records[checksum.extent.file].append((checksum.extent.offset, checksum.extent.end, checksum.what))
        for records in self._records.values():
            records.sort()

    def at(self, file: str, offset: int) -> Place:
        shards = self._shards.get(file, [])
        last = bisect_right(shards, offset, key=lambda entry: entry[0]) - 1
        for begin, end, tensor, shard in reversed(shards[max(0, last - _NESTED) : last + 1]):
            if begin <= offset < end:
                element = _element(shard, (offset - begin) // tensor.item_size)
                index = ", ".join(map(str, element)) if element is not None else "?"
                return Place(f"{tensor.name}[{index}]", tensor.name, element, (offset - begin) % tensor.item_size)
        for begin, end, description in self._records.get(file, []):
            if begin <= offset < end:
                return Place(f"the description of {description}" if description else "a description")
        return Place(f"byte {offset}")

    def names(self, file: str, begin: int, end: int, most: int = 3) -> list[str]:
        """The names of the tensors that have bytes from `begin` to `end`: at most `most` names, then an ellipsis."""
        found = [entry[2].name for entry in self._shards.get(file, []) if entry[0] < end and entry[1] > begin]
        return [*dict.fromkeys(found[:most]), *(["…"] if len(found) > most else [])]


def _element(shard: Shard, place: int) -> tuple[int, ...] | None:
    """The index, in the whole tensor, of an element. `place`: how many elements after the first element of the
    shard."""
    index = []
    if shard.strides is None:
        for size in reversed(shard.sizes):
            place, rest = divmod(place, size)
            index.append(rest)
        index.reverse()
    else:  # the largest stride first; of several indices that share an element, the first one is returned
        found = [0] * len(shard.sizes)
        for at in sorted(range(len(shard.sizes)), key=lambda at: -shard.strides[at]):  # type: ignore[index]
            step = shard.strides[at]
            if step and shard.sizes[at] > 1:
                found[at] = min(place // step, shard.sizes[at] - 1)
                place -= found[at] * step
        if place:
            return None
        index = found
    return tuple(start + inner for start, inner in zip(shard.offsets, index, strict=True))


_LOCATED = 256  # bad chunks in which the flipped bit is searched


class Findings:
    def __init__(
        self, files: Files, layout: Checkpoint, manifests: Manifests | None, saved: Mapping[str, Saved]
    ) -> None:
        self._files, self._manifests, self._saved = files, manifests, saved
        self._places = Places(layout)
        self._crcs: Sequence[tuple[Checksum, int]] = ()  # CRCs of the format that differ

    def problems(self, found: Found) -> Iterator[Problem]:
        for path, why in found.errors.items():
            kind = Trouble.TORN if "cut off" in why else Trouble.UNREADABLE
            yield Problem(kind, f"{posixpath.basename(path)}: {why}", path)
        self._crcs = found.crcs
        yield from self._digests(found.chunks)
        bad = [(chunk.path, chunk.offset, chunk.offset + chunk.length) for chunk in found.chunks]
        for checksum, crc in found.crcs:
            where = checksum.extent
            reported = any(path == where.file and begin < where.end and where.offset < end for path, begin, end in bad)
            if not reported:
                yield self._crc(checksum, crc)
        yield from self._nans(found.nans)

    def _digests(self, chunks: Sequence[BadChunk]) -> Iterator[Problem]:
        for path in dict.fromkeys(chunk.path for chunk in chunks):
            mine = [chunk for chunk in chunks if chunk.path == path]
            if other := self._other_save(path, mine):
                if not self._manifests or self._manifests.knows(path, self._saved[path]):
                    text = f"{posixpath.basename(path)}: it is not from this save, but from {other.save}"
                    yield Problem(Trouble.STALE, text, path)
                continue
            run: list[BadChunk] = []
            for count, chunk in enumerate(mine):
                flipped = self._flipped(chunk) if count < _LOCATED else None
                if run and (flipped or chunk.offset != run[-1].offset + run[-1].length):
                    yield self._run(path, run)
                    run = []
                if flipped:
                    yield flipped
                else:
                    run.append(chunk)
            if run:
                yield self._run(path, run)

    def _other_save(self, path: str, bad: Sequence[BadChunk]) -> Saved | None:
        """Another save of the file that wrote these chunks."""
        others = self._manifests.others(self._saved[path]) if self._manifests else ()
        return next((other for other in others if all(_is(chunk, other) for chunk in bad)), None)

    def _flipped(self, chunk: BadChunk) -> Problem | None:
        """The problem that one bit of the chunk has flipped. None if no single flip explains the change."""
        place = self._by_format(chunk) if chunk.was is None else locate(chunk.crc ^ chunk.was, chunk.length)
        if place is None:
            return None
        byte, bit = place
        if chunk.digest:
            data = bytearray(self._files.read(chunk.path, chunk.offset, chunk.length))
            data[byte] ^= 1 << bit
            if xxh3_64_hexdigest(data) != chunk.digest:
                return None
        at = self._places.at(chunk.path, chunk.offset + byte)
        text = f"{posixpath.basename(chunk.path)}: {_bit(at, bit)} is flipped"
        return _problem(Trouble.DIGEST, text, chunk.path, at, chunk.offset + byte, bit)

    def _by_format(self, chunk: BadChunk) -> tuple[int, int] | None:
        """The bit in the chunk whose flip explains the CRC of the format. It is used if the manifest has no CRCs."""
        for checksum, crc in self._crcs:
            where = checksum.extent
            place = locate(crc ^ checksum.crc, where.length) if where.file == chunk.path else None
            byte = where.offset + place[0] - chunk.offset if place else -1
            if place and 0 <= byte < chunk.length:
                return byte, place[1]
        return None

    def _run(self, path: str, run: Sequence[BadChunk]) -> Problem:
        begin, end = run[0].offset, run[-1].offset + run[-1].length
        names = self._places.names(path, begin, end)
        where = f": they hold {', '.join(names)}" if names else ""
        name, first = posixpath.basename(path), names[0] if names else None
        if self._saved[path].raced:
            text = (
                f"{name}: the bytes {begin} to {end} are not those that were in memory when its save began{where}; it "
                "was so right after the file was written: most likely training went on and changed them"
            )
            return Problem(Trouble.RACED, text, path, first, offset=begin)
        text = f"{name}: the bytes {begin} to {end} are not those that were written{where}"
        return Problem(Trouble.DIGEST, text, path, first, offset=begin)

    def _crc(self, checksum: Checksum, crc: int) -> Problem:
        where, name = checksum.extent, posixpath.basename(checksum.extent.file)
        place = locate(crc ^ checksum.crc, where.length)
        if place is None:
            names = self._places.names(where.file, where.offset, where.end)
            what = ", ".join(names) if names else f"the description of {checksum.what}"
            text = f"{name}: the CRC differs: more than one bit of {what} is not what was written"
            return Problem(Trouble.CRC, text, where.file, names[0] if names else None, offset=where.offset)
        at = self._places.at(where.file, where.offset + place[0])
        text = f"{name}: the CRC differs, as it does when {_bit(at, place[1])} is flipped"
        return _problem(Trouble.CRC, text, where.file, at, where.offset + place[0], place[1])

    def _nans(self, nans: Sequence[Nans]) -> Iterator[Problem]:
        counts: dict[str, int] = {}
        first: dict[str, tuple[Nans, Place]] = {}
        for run in nans:
            at = self._places.at(run.path, run.offset)
            key = at.tensor or at.text
            first.setdefault(key, (run, at))
            counts[key] = counts.get(key, 0) + run.count
        for key, (run, at) in first.items():
            more = f", the first of {counts[key]}" if counts[key] > 1 else ""
            text = f"{posixpath.basename(run.path)}: {at.text} is NaN{more}"
            yield Problem(Trouble.NAN, text, run.path, at.tensor, at.element, offset=run.offset)


def _is(chunk: BadChunk, other: Saved) -> bool:
    """Whether the chunk has the contents that another save wrote at this place."""
    digest, crc = other.digest_at(chunk.offset)
    return digest == chunk.now if digest else crc == chunk.crc


def _bit(at: Place, bit: int) -> str:
    return f"bit {8 * at.byte + bit} of {at.text}"


def _problem(kind: Trouble, text: str, path: str, at: Place, offset: int, bit: int) -> Problem:
    bits = (8 * at.byte + bit,) if at.tensor else None
    return Problem(kind, text, path, at.tensor, at.element, bits, offset)


ALL = frozenset({"crc", "digest", "nan"})


class Answer(str, Enum):
    """Whether a checkpoint is whole, as far as this is known."""

    WHOLE = "whole"
    INCOMPLETE = "incomplete"  # parts are missing: its save was not finished, or they were cut off or deleted later
    DAMAGED = "damaged"
    UNKNOWN = "unknown"  # it is of a kind that is not read
    UNTOLD = "can't be told"  # it was read, and nothing shows whether it is whole


@dataclass
class Verified:
    """The result for one checkpoint. `unseen`: parts in which damage would not be found, and why."""

    layout: Checkpoint
    problems: list[Problem]
    unseen: list[str] = field(default_factory=list)
    bare: bool = False  # neither a CRC nor a digest covers all of its contents
    manifest: bool = False  # a manifest covers at least a part of it
    bytes: int = 0  # bytes of contents that were read
    links: list[str] = field(default_factory=list)  # the names of the checkpoints on which it builds

    @property
    def answer(self) -> Answer:
        kinds = {problem.kind for problem in self.problems if not problem.is_blind}
        if kinds:
            return Answer.INCOMPLETE if kinds <= {Trouble.TORN, Trouble.UNFINISHED} else Answer.DAMAGED
        if any(problem.kind is Trouble.UNKNOWN for problem in self.problems):
            return Answer.UNKNOWN
        return Answer.UNTOLD if self.problems or self.unseen else Answer.WHOLE

    @property
    def code(self) -> ExitCode:
        if self.answer is Answer.WHOLE:
            return ExitCode.PASSED
        return ExitCode.INCONCLUSIVE if self.answer in (Answer.UNKNOWN, Answer.UNTOLD) else ExitCode.FAILED


def verify(
    files: Files,
    path: str,
    manifests: Manifests | None = None,
    checks: frozenset[str] = ALL,
    workers: int | None = None,
    links: dict[str, Verified] | None = None,
) -> Verified:
    """Checks one checkpoint, and those on which it builds. `links`: keeps the results of the latter, for other
    checkpoints of the same folder. Raises OSError if the checkpoint's path can't be read at all; every other error is
    in the result."""
    result = _alone(files, formats.read(files, path), manifests, checks, workers)
    links = {} if links is None else links
    for name, one in chain(files, result.layout):
        result.links += [name] if name else []
        if isinstance(one, Problem):
            result.problems.append(one)
            continue
        if one.path not in links:
            links[one.path] = _alone(files, one, manifests, checks, workers)
        _judge_link(result, name, links[one.path])
    return result


def _judge_link(result: Verified, name: str, link: Verified) -> None:
    """Adds to the result what follows from the checkpoint on which this one builds. If that one is not whole, neither
    is this one; if its state is not known, neither is this one's."""
    result.bytes += link.bytes
    for problem in link.problems:
        kind = Trouble.LIMIT if problem.is_blind else problem.kind
        result.problems.append(replace(problem, kind=kind, text=f"it builds upon {name}: {problem.text}"))
    result.unseen += [f"it builds upon {name}: {text}" for text in link.unseen if text not in result.unseen]
    result.bare |= link.bare


def _alone(
    files: Files, layout: Checkpoint, manifests: Manifests | None, checks: frozenset[str], workers: int | None
) -> Verified:
    """Checks one checkpoint by itself."""
    result = Verified(layout, list(layout.problems))
    known: dict[str, Saved] = {}
    if manifests:
        near = manifests.of_files({file.path: file.size for file in layout.files})
        known = {path: _its_save(files, manifests, path, saved) for path, saved in near.items()}
        result.manifest = any(saved.has_digests for saved in known.values())
    sized = {path: saved for path, saved in known.items() if _check_size(result, path, saved)}
    if manifests:
        _check_set(result, manifests, known)
    findings = Findings(files, layout, manifests, sized)
    spans = {path: saved.spans for path, saved in sized.items()}
    found = Stream(files, workers).run(windows(layout, spans, checks))
    result.bytes = found.bytes
    result.problems += findings.problems(found)
    if "digest" in checks:
        result.problems += [text for path, saved in sized.items() if (text := rest_differs(files, path, saved))]
    bare = _bare(layout, known, checks)
    result.bare = bool(bare)
    result.unseen = [*bare, *_left_open(layout, result.manifest)]
    return result


def _its_save(files: Files, manifests: Manifests, path: str, saved: Saved) -> Saved:
    """The save that wrote this file. If only the file's name led to `saved`, an older save may have the same
    headers."""
    if manifests.knows(path, saved):
        return saved
    every = (saved, *reversed(manifests.others(saved)))
    return next((one for one in every if one.rest and rest_differs(files, path, one) is None), saved)


def _check_size(result: Verified, path: str, saved: Saved) -> bool:
    size = next(file.size for file in result.layout.files if file.path == path)
    if size == saved.size:
        return True
    kind = Trouble.TORN if size < saved.size else Trouble.DIGEST
    text = f"{posixpath.basename(path)}: {size} bytes, where {saved.size} were written"
    result.problems.append(Problem(kind, text, path))
    return False


def _check_set(result: Verified, manifests: Manifests, known: dict[str, Saved]) -> None:
    """Checks that no saved file is missing, and that all files are from the same save."""
    there = {saved.path for saved in known.values()}
    expected = manifests.expected(result.layout.path, known.values())
    for saved in expected:
        if saved.path not in there:
            name = posixpath.basename(saved.path)
            result.problems.append(Problem(Trouble.TORN, f"{name}: missing, though it was saved", saved.path))
    if not expected:  # the folder was renamed: the files must agree on the folder in which they were saved
        folders = {posixpath.dirname(saved.path): path for path, saved in known.items() if saved.save != saved.path}
        if len(folders) > 1 and (form := format_table.named(result.layout.format)) and form.one_save:
            text = f"its files were saved as parts of {' and '.join(sorted(map(posixpath.basename, folders)))}"
            result.problems.append(Problem(Trouble.STALE, text))


def _left_open(layout: Checkpoint, manifest: bool) -> list[str]:
    """Why it is not known whether this is the whole checkpoint, as far as the layout shows it."""
    if not layout.loadable or any(problem.kind is Trouble.UNKNOWN for problem in layout.problems):
        return []
    if layout.unread:
        return [f"its files of the type {', '.join(layout.unread)} are not read"]
    if not layout.tensors:
        return [] if layout.problems else ["it holds no tensors"]
    if not any(map(format.has_name, layout.tensors)):
        return ["its tensors have no names, so nothing shows that they are a model"]
    if not format.holds_a_model(layout):
        return ["it holds only states of an optimizer or of generators"]
    if "the model" in layout.missing:
        return ["where the model is: none of its files is known to hold it"]
    if layout.left_open and not manifest:
        return layout.left_open
    if format.is_part(layout.path):
        return ["whether other parts are missing: its name or its folder says that it is one of several"]
    if manifest or layout.format != UNKNOWN_LAYOUT or format.one_stands_alone(layout):
        return []
    return ["whether one of its files is missing: its layout is not known, and no manifest shows which were written"]


def _bare(layout: Checkpoint, known: dict[str, Saved], checks: frozenset[str]) -> list[str]:
    """The contents that neither a CRC nor a digest covers."""
    summed = {checksum.extent.file for checksum in layout.checksums} if "crc" in checks else set()
    covered = {path for path, saved in known.items() if saved.has_digests} if "digest" in checks else set()
    bare = sorted({extent.file for tensor in layout.tensors.values() for extent in tensor.extents} - covered - summed)
    if not bare:
        return []
    names = ", ".join(posixpath.basename(path) for path in bare[:3]) + (", …" if len(bare) > 3 else "")
    return [
        f"the contents of {names}: no CRC in the format and no manifest shows which bytes were written; use --manifest "
        "with a run directory of torchaos"
    ]
