"""The base class of checkpoint formats, and the code that all formats share. A new format is one file with a subclass
of `Format`. No other file names it.

- The names of files and folders tell the step, and whether the checkpoint is finished.
- A format declares the parts of a checkpoint that a resume needs. For a format without a declaration, they are guessed
from the names of the entries. A part that is missing according to a guess is reported, but is no damage.
- In a folder of files that together are one checkpoint, each file is read by its own format."""

from __future__ import annotations

import errno
import json
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from xxhash import xxh3_64_hexdigest

from torchaos.harness.interfaces import CheckpointFormat

from ..files import Files
from ..layout import Checkpoint, File, Problem, Trouble, Unreadable
from ..tensor_values import Contents
from . import format
from .format_table import of_folder, of_name, of_start, role_of, table


class Format(CheckpointFormat):
    """A checkpoint format. It is recognised by the name of a file (`suffixes`), by the first bytes of a file
    (`starts`), or by the names in a folder (`is_folder`). Everything except `name` has a default.

    Readers fill `into`: tensors, values, checksums, and problems. The names of these entries begin with `prefix`. A
    reader raises Unreadable or OSError if it can't read any further."""

    name: ClassVar[str]  # as `torchaos verify` prints it
    asked: ClassVar[int] = 50  # formats are tried in this order, from the lowest; special formats first

    suffixes: ClassVar[tuple[str, ...]] = ()  # suffixes of files that are read one by one
    starts: ClassVar[tuple[bytes, ...]] = ()  # the first bytes of such a file, for a file with another name (is_file)
    parts: ClassVar[tuple[str, ...]] = ()  # suffixes of files that hold tensors, and can only be read with other files
    metadata: ClassVar[tuple[str, ...]] = ()  # names of files that give the places of tensors in other files
    tracker: ClassVar[str] = ""  # the name of a file beside the checkpoints that names the newest checkpoint
    one_save: ClassVar[bool] = False  # one save writes all files of a checkpoint

    # The parts that a resume needs, in words, each with a pattern: for the paths of files, relative to the checkpoint,
    # or for the names of tensors and values. A format that declares neither is judged by common names of such parts.
    needed_files: ClassVar[Mapping[str, str]] = {}
    needed_entries: ClassVar[Mapping[str, str]] = {}
    model_only: ClassVar[bool] = False  # it can only hold the tensors of a model

    def is_file(self, start: bytes) -> bool:
        """Whether a file whose name shows no format is of this format, by its first bytes (at most 512)."""
        return bool(self.starts) and start.startswith(self.starts)

    def is_folder(self, files: Files, folder: str, names: Sequence[str]) -> bool:
        """Whether a folder with these names in it is a checkpoint of this format."""
        return False

    def refines(self, found: Checkpoint) -> bool:
        """Whether a checkpoint that was read as `found.format` is of this format, judged by its contents."""
        return False

    def tracked(self, text: str) -> str | None:
        """The name of the checkpoint that a tracker file with this text names. None if the format writes no such
        text."""
        return text or None

    def read_file(self, files: Files, path: str, size: int, into: Checkpoint, prefix: str = "") -> None:
        """Reads one file. `size`: bytes."""
        raise Unreadable(f"a single file can't be of the format {self.name}")

    def read_folder(self, files: Files, folder: str, into: Checkpoint, prefix: str = "") -> None:
        """Reads a folder. By default, each file and each folder in it is read by its own format."""
        format.read_folder(files, folder, into, prefix)

    def read_parts(
        self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str
    ) -> Collection[str]:
        """Reads files that can only be read together, in a folder of any format. Returns the names that no other reader
        must read."""
        return ()

    def check_set(self, files: Files, folder: str, names: Sequence[str], into: Checkpoint, prefix: str) -> None:
        """Adds a problem for each missing file of a set. It is called for every folder and every format, after all
        files of the folder were read."""


_GUESSED = {
    "the optimizer's state": re.compile(r"optim|exp_avg|momentum|(^|[.:])opt\b", re.I),
    "the learning rate schedule": re.compile(r"sched|last_epoch|(^|[.:_])lr", re.I),
    "the state of the random number generators": re.compile(r"rng|random|seed|mt19937|\bgen(?:erator)?s?\b", re.I),
    "how far training was": re.compile(r"step|iter|epoch|consumed", re.I),
}
_ALONE = ("the optimizer's state", "how far training was")
_OF_OPTIMIZER = re.compile(
    r"(^|[.:])state\.\d+\.|exp_avg|momentum_buffer|(^|[.:/])(optimizer|optim|opt_state)s?([._:/]|$|_states?)", re.I
)
_OF_MODEL = re.compile(r"(model|module|state_dict|weights?)([._:/]|$)", re.I)
_PART = re.compile(
    r"(?<![a-z])(rank|shard|part|worker|proc|tp|pp|dp|mp|ep)[-_]?\d|\d[-_]of[-_]\d|^\d+$|\.\d+$"
    r"|^consolidated\.(?!00)\d\d\.",  # Llama's; the first may be the only one
    re.I,
)
_OF_RANK = re.compile(r"(^|[/_-])rank[-_]?\d+$", re.I)


def missing(form: Format, found: Checkpoint) -> list[str]:
    """The missing parts in words; empty if nothing is missing."""
    if form.model_only and holds_a_model(found):
        return ["the optimizer's state: this format holds tensors of a model only"]
    if form.needed_files:
        return _lacking(form.needed_files, [file.path[len(found.path) + 1 :] for file in found.files])
    names = [*found.tensors, *found.values]
    if form.needed_entries:
        return _lacking(form.needed_entries, names)
    if not holds_a_model(found):
        return []  # a part of a checkpoint: other files have what it lacks
    return [part for part, pattern in _GUESSED.items() if not any(map(pattern.search, names))]


def holds_a_model(found: Checkpoint) -> bool:
    """Whether there is a tensor of a model: its name belongs to no optimizer, and its type is not that of a generator's
    state. Without such a tensor, a file or folder is only a part of a checkpoint. (A file may be named after the
    optimizer's state that it holds.)"""
    own = posixpath.basename(found.path) if [file.path for file in found.files] == [found.path] else ""
    named = ((name if _OF_MODEL.match(name) else f"{own}:{name}", one) for name, one in found.tensors.items())
    return any(
        has_name(name) and not _OF_OPTIMIZER.search(name) and not (tensor.dtype == "uint8" and len(tensor.shape) == 1)
        for name, tensor in named
    )


def has_name(entry: str) -> bool:
    """Whether an entry has a name, and not only a place in a list, as the tensors of a data set have."""
    return re.search(r"[^\W\d_]", entry.rpartition(":")[2]) is not None


def stands_alone(found: Checkpoint) -> bool:
    """Whether a file is a complete checkpoint by itself; False if its name says that it is one of several parts."""
    names = [*found.tensors, *found.values]
    lacks = [part for part in _ALONE if not any(map(_GUESSED[part].search, names))]
    return holds_a_model(found) and not is_part(found.path) and not lacks


def one_stands_alone(found: Checkpoint) -> bool:
    """Whether a file of this folder, or an inner folder of a known format, is a complete checkpoint by itself. False if
    the name of a file outside these inner folders says that the file is one of several parts."""
    names = [file.path[len(found.path) + 1 :] for file in found.files]
    loose = [name for name in names if not name.startswith(tuple(found.inner))]
    units = [*found.inner, *(f"{name}:" for name in loose)]
    return not any(map(is_part, loose)) and any(stands_alone(_part(found, unit)) for unit in units)


def _part(found: Checkpoint, head: str) -> Checkpoint:
    """The part of a folder's checkpoint whose entries have names that begin with `head`: the entries of one file, or of
    one inner folder."""
    part = Checkpoint(head, found.format)
    part.tensors = {name: tensor for name, tensor in found.tensors.items() if name.startswith(head)}
    part.values = {name: value for name, value in found.values.items() if name.startswith(head)}
    return part


def is_part(path: str) -> bool:
    """Whether the name of a file, or of the folder of a rank in which it is, says that it is one of several parts, such
    as `model_rank_0.pt`, `state.0`, `0`, or `mp_rank_00/last.ckpt`."""
    folder, name = posixpath.split(path)
    return bool(_PART.search(name) or _OF_RANK.search(folder))


def _lacking(wanted: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [part for part, pattern in wanted.items() if not any(re.search(pattern, name) for name in names)]


UNFINISHED = re.compile(r"^\.|^tmp[-_]|[._-](partial|tmp|temp|incomplete|writing|damaged|corrupt)\b")
MARK = "-unfinished"  # the end of the name of a file that NeMo 2 keeps beside a checkpoint until it is finished
UNKNOWN_LAYOUT = "dir"  # the name of Numbered: a folder that belongs to no other format
NUMBERED = re.compile(  # `ba`: batches, as Composer counts its steps
    r"(?P<word>checkpoint|ckpt|step|iter|iteration|(?<![a-zA-Z])ba)[-_=]?(?P<number>\d+)"
)


def number_in(name: str) -> int | None:
    """The step in the name of a checkpoint. Nanotron and Orbax name a folder by the number alone."""
    found = NUMBERED.search(name)
    number = found["number"] if found else name
    return int(number) if number.isdecimal() else None


_JSON = 1 << 26
_OF = re.compile(r"^(?P<head>.+-)(?P<number>\d{5,6})-of-(?P<count>\d{5,6})(?P<tail>\.\w+)$")
_COMMENT, _TRAILING = re.compile(rb"^\s*//[^\n]*$|/\*.*?\*/", re.M | re.S), re.compile(rb",(\s*[}\]])")
_MOST_RANKS = 100_000
_ENTRIES, _DEPTH = 20_000, 16  # of a value of a JSON file


def read_folder(files: Files, folder: str, into: Checkpoint, prefix: str = "") -> None:
    """Reads everything in the folder, including folders in it. A problem in one file is recorded, and the other files
    are still read."""
    names = files.names(folder)
    read = {name for each_format in table() for name in each_format.read_parts(files, folder, names, into, prefix)}
    for name in names:
        if name in read:
            continue
        path = f"{folder}/{name}"
        try:
            if not files.is_dir(path):
                _read_file(files, path, into, prefix, name)
            elif form := of_folder(files, path, files.names(path)):
                if form.name != UNKNOWN_LAYOUT:
                    into.inner.append(f"{prefix}{name}/")
                form.read_folder(files, path, into, f"{prefix}{name}/")
            else:
                read_folder(files, path, into, f"{prefix}{name}/")
        except (Unreadable, OSError) as error:
            into.problems.append(problem_of(error, prefix + name, path))
    _check_numbers(names, into, prefix)
    for known in table():
        known.check_set(files, folder, names, into, prefix)


def problem_of(error: Exception, what: str, path: str) -> Problem:
    """The problem that an Unreadable or an OSError describes. `what`: the tensor or file that could not be read."""
    if isinstance(error, Unreadable):
        return Problem(error.kind, f"{what}: {error}", path)
    kind = Trouble.TORN if isinstance(error, FileNotFoundError) else Trouble.UNREADABLE
    if getattr(error, "errno", None) == errno.ENODEV:  # a pipe, a socket or a device
        kind = Trouble.UNKNOWN
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Problem(kind, f"{what}: {text}", path)


def _read_file(files: Files, path: str, into: Checkpoint, prefix: str, name: str) -> None:
    if form := of_name(name):
        form.read_file(files, path, files.size(path), into, f"{prefix}{name}:")
    elif name.endswith(".json"):
        values = {key: _short(value) for key, value in read_json(files, path).items()}
        Contents(into.values, into.tensors, into.opaque).add(f"{prefix}{name}:", values, lambda _name, _ref: None)
    elif form := of_start(files, path, in_folder=True):
        into.by_content.add(path)
        form.read_file(files, path, files.size(path), into, f"{prefix}{name}:")


def _short(value: Any) -> Any:
    """A value of a JSON file. If it has many entries, such as the vocabulary of a tokenizer, a digest of it."""
    left, inside, depth = _ENTRIES, [value], 0
    while inside and left > 0 and depth < _DEPTH:
        nested = [each for each in inside if isinstance(each, (dict, list))]
        inside = [item for each in nested for item in (each.values() if isinstance(each, dict) else each)]
        left, depth = left - len(inside), depth + 1
    return value if not inside else f"many entries, digest {xxh3_64_hexdigest(json.dumps(value).encode())}"


def read_json(files: Files, path: str) -> dict[str, Any]:
    """The contents of a JSON file. Empty if it is JSON, but no object. Raises Unreadable if it is no JSON, or too
    large."""
    size = files.size(path)
    if size > _JSON:
        raise Unreadable(f"{size} bytes of JSON, more than are read", Trouble.LIMIT)
    text = files.read(path, 0, size)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _is_lines(text) or _is_commented(text):
            return {}
        kind = Trouble.TORN if not size or _is_cut_off(text, error) else Trouble.UNREADABLE
        raise Unreadable(f"no JSON: {str(error)[:100]}", kind) from error
    return found if isinstance(found, dict) else {}


def _is_cut_off(text: bytes, error: Exception) -> bool:
    """Whether the JSON is right up to the end of the file and should go on there."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    rest = text.decode(errors="replace")[error.pos :].strip()
    return error.msg.startswith("Unterminated string") or re.fullmatch(r"[\w.+-]*", rest) is not None


def _is_lines(text: bytes) -> bool:
    """Whether each line of a file is JSON, as in many logs."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return len(lines) > 1 and all(isinstance(json.loads(line), (dict, list)) for line in lines)
    except (ValueError, RecursionError):
        return False


def _is_commented(text: bytes) -> bool:
    """Whether the text is JSON, except for comments and for commas before a bracket, which many readers accept."""
    plain = _TRAILING.sub(rb"\1", _COMMENT.sub(b"", text))
    try:
        return plain != text and isinstance(json.loads(plain), (dict, list))
    except (ValueError, RecursionError):
        return False


def _check_numbers(names: Sequence[str], into: Checkpoint, prefix: str) -> None:
    """Checks that all files of a numbered set exist, for example three files `model-00001-of-00003.safetensors`."""
    have = set(names)
    for name in names:
        if whole := _OF.match(name):
            each = f"{whole['head']}{{:0{len(whole['number'])}}}-of-{whole['count']}{whole['tail']}"
            first, count = int(each.format(0) not in have), min(int(whole["count"]), 9999)
            note_missing(into, prefix, [each.format(number) for number in range(first, first + count)], have)


def check_ranks(pattern: re.Pattern[str], names: Sequence[str], into: Checkpoint, prefix: str) -> None:
    """Adds a problem for each missing file of a rank that is not the last rank. The pattern has the groups `head`,
    `rank` and `tail`."""
    found = [match for match in map(pattern.match, names) if match]
    ranks = {int(match["rank"]) for match in found}
    if found and len(ranks) < max(ranks) + 1 <= _MOST_RANKS:
        for rank in sorted(set(range(max(ranks) + 1)) - ranks):
            text = f"{prefix}{found[0]['head']}{rank}{found[0]['tail']}: missing, and those of later ranks are there"
            into.problems.append(Problem(Trouble.TORN, text))


def note_missing(into: Checkpoint, prefix: str, wanted: Sequence[str], have: set[str]) -> None:
    """Adds a problem for each file in `wanted` that the folder lacks."""
    for name in wanted:
        text = f"{prefix}{name}: missing"
        if name not in have and all(problem.text != text for problem in into.problems):
            into.problems.append(Problem(Trouble.TORN, text))


def all_files(files: Files, path: str) -> list[File]:
    """Every file of a checkpoint, with its size in bytes. A broken link has size 0."""
    if not files.is_dir(path):
        return [File(path, files.size(path), role_of(path))]
    found: list[File] = []
    for name in files.names(path):
        inner = f"{path}/{name}"
        try:
            found += all_files(files, inner)
        except OSError:
            found.append(File(inner, 0, role_of(inner)))
    return found
