"""All checks of one checkpoint, and their result."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from enum import Enum

from torchaos.harness.record.result import ExitCode

from .. import formats
from ..files import Files
from ..formats import format, format_table
from ..formats.format import UNKNOWN_LAYOUT
from ..layout import Checkpoint, Problem, Trouble
from .damage_findings import Findings
from .manifests import Manifests, Saved
from .stream import Stream, rest_differs, windows

ALL = frozenset({"crc", "digest", "nan"})


class Answer(str, Enum):
    """What is known of a checkpoint."""

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
) -> Verified:
    """Checks one checkpoint. Raises OSError if its path can't be read at all; every other error is in the result."""
    layout = formats.read(files, path)
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
    """The save that wrote this file. If only its name led to `saved`, an older save may have the same headers."""
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
    """What the layout leaves open: whether this is the whole checkpoint."""
    if not layout.loadable or any(problem.kind is Trouble.UNKNOWN for problem in layout.problems):
        return []
    if layout.unread:
        return [f"its files of the type {', '.join(layout.unread)} are not read"]
    if not layout.tensors:
        return [] if layout.problems else ["it holds no tensors"]
    if not format.holds_a_model(layout):
        return ["it holds only states of an optimizer or of generators"]
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
