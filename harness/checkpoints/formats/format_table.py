"""The table of all formats, made from their declarations: the formats of torchaos, in this folder, and those of other
packages, by entry points of the group `torchaos.formats`.

If no format reads a file, its bytes and its name show its kind, such as "a plain pickle". These words say what was
seen, and are no check of the file.

Sources: the formats' own specifications; for kinds without one, the first bytes that their writers put down."""

from __future__ import annotations

import mimetypes
import posixpath
import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING

from torchaos.harness import registry
from torchaos.harness.interfaces import UsageError

from ..files import Files
from ..layout import Unreadable, torn, unknown

if TYPE_CHECKING:
    from .format import Format


ZIP = b"PK\3\4"
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_POINTER = b"version https://git-lfs.github.com/spec/"
LOOK = 1024  # bytes; a tar's mark is at 257
_MARKS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras and h5py write"),
    (0, b"\x93NUMPY", "an array of numpy.save"),
    (0, b"GGUF", "a GGUF file, as llama.cpp reads"),
    (0, b"lmgg", "a GGML file"),
    (0, b"tjgg", "a GGML file"),
    (4, b"TFL3", "a model of TensorFlow Lite"),
    (0, b"ftrt", "an engine of TensorRT"),
    (0, (20240326).to_bytes(4, "little"), "a model of llm.c"),
    (0, (20240327).to_bytes(4, "little"), "a state of llm.c"),
    (0, (20240520).to_bytes(4, "little"), "tokens of llm.c"),
    (0, b"\x00\x05\x16\x07", "what macOS keeps of another file"),
    (0, b"PAR1", "a Parquet file"),
    (0, b"ARROW1", "an Arrow file"),
    (0, b"SQLite format 3\0", "an SQLite database"),
    (0, b"\x7fELF", "a program or library"),
    (0, b"\x89PNG", "an image"),
    (0, b"\xff\xd8\xff", "an image"),
    (0, b"%PDF", "a PDF"),
    (0, b"\x1f\x8b", "compressed by gzip"),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (0, b"\x04\x22\x4d\x18", "compressed by lz4"),
    (0, b"BZh", "compressed by bzip2"),
    (0, b"\xfd7zXZ\0", "compressed by xz"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (257, b"ustar", "a tar archive, as NeMo and torch before 0.2 write"),
    (0, b"Salted__", "encrypted by openssl"),
    (0, b"age-encryption.org/", "encrypted by age"),
    (0, b"-----BEGIN PGP", "encrypted by PGP"),
)
_TEXTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"<(?:!doctype\s+html|html|head|body|title)\b", re.I), "a page of HTML"),
    (re.compile(r"<(?:\?xml|!--|Error>|svg\b)"), "XML"),
    (re.compile(r"[{\[]\s*(?:[\"{}\[\]\d]|true|false|null)"), "JSON, or the like"),
)
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_TF_FOOTER = bytes.fromhex("57fb808b247547db")  # of a table of LevelDB, in which TensorFlow keeps its index
_OLD_PICKLE = re.compile(rb"^\(?[dl]p\d+\n|^\(?i?c[\w.]+\n\w+\n|^[}\]]q.")  # protocols 0 and 1
_TF_DATA = re.compile(r"\.data-\d{5}-of-\d{5}$")
SCRIPT = re.compile(r"^constants\.pkl$|^code/")  # the records of TorchScript, without the archive's folder
# The kinds of zip archives, by a name that is in them.
_ZIPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^_stable_baselines3_version$"), "an archive of stable-baselines3"),
    (SCRIPT, "a TorchScript archive"),
    (
        re.compile(r"^archive_format$|^models/.*\.json$|^serialized_exported_program\.json$"),
        "an archive of torch.export",
    ),
    (re.compile(r"^model\.weights\.h5$"), "a .keras archive"),
    (re.compile(r"^MANIFEST\.json$"), "an archive of TorchServe"),
    (re.compile(r"\.npy$"), "a file of numpy.savez"),
)


def instead(files: Files, path: str, size: int) -> Unreadable | None:
    """Why a file can't be read that is of another kind than its name says, or of a kind without a format. None if its
    bytes show no kind. Raises OSError if the file can't be read."""
    if files.read(path, 0, len(_POINTER)) == _POINTER:
        return torn("only a pointer of Git LFS is here, not the file itself")
    if form := of_start(files, path):
        return unknown(f"its bytes are those of a {form.name} file, and its name that of another format")
    found = words(files, path, size)
    return unknown(found) if found else None


def words(files: Files, path: str, size: int) -> str | None:
    """The kind of a file, such as "a plain pickle". None if its bytes show no known kind. Raises OSError if the file
    can't be read."""
    start, name = files.read(path, 0, LOOK), posixpath.basename(path)
    for offset, mark, what in _MARKS:
        if start[offset : offset + len(mark)] == mark:
            return what
    if start.startswith(PICKLES):
        return "a file of joblib" if b"joblib" in start else "a plain pickle, not one of torch.save"
    if start[8:12] != bytes(4) and b"brain.Event:" in start[12:40]:
        return "an event file of TensorBoard"
    if _TF_DATA.search(name) or (size >= 48 and files.read(path, size - 8, 8) == _TF_FOOTER):
        return "a part of a checkpoint of TensorFlow"
    if start[:1] == b"\x08" and start[1:2] < b"\x20" and start[2:3] in b"\x12\x22\x3a\x42" and len(start) > 2:
        return "an ONNX model"
    if name.endswith((".msgpack", ".flax")) and (start[:1] in b"\xde\xdf" or b"\x80" <= start[:1] <= b"\x8f"):
        return "a msgpack file, as Flax writes"
    if start.startswith(_ZLIB) and name.endswith((".z", ".pkl", ".joblib", ".gz", ".pickle")):
        return "compressed by zlib"
    if _OLD_PICKLE.match(start):
        return "a plain pickle, not one of torch.save"
    return _text(start)


def begins_as_own(start: bytes) -> bool:
    """Whether torch.save wrote the zip archive that begins with these bytes, by the name of its first record."""
    length = int.from_bytes(start[26:28], "little")
    return start[30 : 30 + length].endswith(b"/data.pkl")


def is_pickle(start: bytes) -> bool:
    """Whether a file with these first bytes may be a plain pickle."""
    return start.startswith(PICKLES) or _OLD_PICKLE.match(start) is not None


def archive(names: Collection[str]) -> str:
    """The kind of a zip archive, by the names in it."""
    fitting = (what for pattern, what in _ZIPS if any(map(pattern.search, names)))
    return next(fitting, "a zip archive, not one of torch.save")


def _text(start: bytes) -> str | None:
    try:
        text = start.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3 or len(start) < LOOK:
            return None
        text = start[: error.start].decode()
    if not text.strip() or any(char < " " and char not in "\t\r\n\f\x1b" for char in text):
        return None
    return next((what for pattern, what in _TEXTS if pattern.match(text.lstrip())), "text")


_JSON, _START = ".json", 512  # bytes, in which the name of an archive's first record is
# Types of files that often hold tensors. Files of these types that no format reads are reported.
_KNOWN = (".npz", ".npy", ".h5", ".hdf5", ".msgpack", ".gz", ".zst", ".tar", ".zip", ".gguf", ".onnx", ".params")


@cache
def table() -> tuple[Format, ...]:
    """All formats, specialised formats before general ones. Raises UsageError if a format can't be loaded, or if there
    is none."""
    made = [found() for found in registry.all_of("formats").values()]
    if not made:
        raise UsageError(
            "no checkpoint format is installed: the metadata of torchaos is older than its code; install it again"
        )
    return tuple(sorted(made, key=lambda form: (form.asked, form.name)))


def named(name: str) -> Format | None:
    return next((form for form in table() if form.name == name), None)


def of_name(name: str) -> Format | None:
    is_own = not name.startswith("._")  # on a file system that is not its own, macOS puts such a file beside another
    return next((form for form in table() if is_own and name.endswith(form.suffixes)), None)


def of_start(files: Files, path: str, in_folder: bool = False) -> Format | None:
    """The format of a file, by the file's first bytes. None if no format fits. `in_folder`: of any file in the folder
    of a checkpoint, where other archives may lie."""
    try:
        start = files.read(path, 0, _START)
    except OSError:
        if in_folder:
            return None  # such as a broken link: nothing shows that it is a part of the checkpoint
        raise
    if _of_part(path) or (in_folder and start.startswith(ZIP) and not begins_as_own(start)):
        return None
    return next((form for form in table() if form.is_file(start)), None)


def of_no_format(files: Files, path: str, size: int) -> Unreadable:
    """Why a file that no format reads on its own is not read."""
    if not size:
        kind = mimetypes.guess_type(path)[0] or ""
        return unknown("an empty text") if kind.startswith("text/") else torn("empty")
    if form := _of_part(path):
        return unknown(f"a part of a checkpoint ({form.name}): give its folder")
    return instead(files, path, size) or unknown("its first bytes are of no kind that is known")


def _of_part(path: str) -> Format | None:
    """If the name of a file shows that it is a part that can't be read alone: the format to which it belongs."""
    name = posixpath.basename(path)
    return next((form for form in table() if name in form.metadata or (form.parts and name.endswith(form.parts))), None)


def of_folder(files: Files, folder: str, names: Sequence[str]) -> Format | None:
    """The format of a folder, by the names in it."""
    return next((form for form in table() if form.is_folder(files, folder, names)), None)


def may_hold_tensors(path: str) -> bool:
    return path.endswith(tuple(end for form in table() for end in (*form.suffixes, *form.parts, *form.metadata)))


def role_of(path: str) -> str:
    """The role of a file in a checkpoint: metadata, data, or other."""
    name = posixpath.basename(path)
    if name.endswith(_JSON) or any(name in form.metadata for form in table()):
        return "metadata"
    return "data" if name.endswith(tuple(end for form in table() for end in (*form.suffixes, *form.parts))) else "other"


def unread_type(name: str) -> str | None:
    """The type of a file that may hold tensors but is read by no format. None for any other file."""
    return None if of_name(name) else next((end for end in _KNOWN if name.lower().endswith(end)), None)


def tracker_names() -> tuple[str, ...]:
    """The names of files beside checkpoints that name the newest checkpoint, such as DeepSpeed's `latest`."""
    return tuple(sorted({form.tracker for form in table() if form.tracker}))
