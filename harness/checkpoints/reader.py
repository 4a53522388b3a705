"""Reads all checkpoints in a folder, and prints one line of JSON for each: inventory.py runs it in a process.

It runs with the job's Python and torch, which need not have torchaos: so it, contents.py and dcp.py import only the
standard library, torch and each other, and no code but theirs and torch's: nothing is unpickled that could run any.
All digests are of values, not of files, so that equal contents are equal whatever their layout.

Formats: DCP folders, files of torch.save, safetensors (https://github.com/huggingface/safetensors#format), and folders
of such files, as Transformers (`checkpoint-N/`), Accelerate (`checkpoint_N/`) and DeepSpeed (`global_stepN/`) write.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator

import torch

from .contents import Contents, Damaged, check_crcs, digest, load
from .dcp import read_dcp

_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


_TORCH_FILES = {".pt", ".pth", ".ckpt", ".bin", ".pkl"}
_UNFINISHED = re.compile(r"^\.|^tmp[-_]|[._-](partial|tmp|temp|incomplete|writing|damaged|corrupt)\b")
_NUMBERED = re.compile(r"(?P<word>checkpoint|ckpt|step|iter|iteration)[-_=]?(?P<number>\d+)")
_STEP_KEYS = {"global_step", "step", "iteration"}


@dataclass(frozen=True)
class Checkpoint:
    path: str  # relative to the root
    format: str  # dcp, torch, safetensors or dir
    step: int | None  # from its contents or its name
    complete: bool  # nothing is missing that it should hold, and its own name doesn't call it unfinished
    loadable: bool  # all of it could be read
    problem: str | None  # the first one; it may be loadable and have one
    unopened: list[str]  # files in it that only unpickling would open, so that their contents are not known
    tensors: dict[str, str]  # digest of type, shape and bytes, by name: nested keys joined by dots, after "FILE:"
    values: dict[str, str]  # repr of each scalar, or a digest of what is long
    bytes: int


def read_torch(path: Path, found: Contents, prefix: str = "") -> None:
    with open(path, "rb") as file:
        start = file.read(4)
        if start == b"PK\x03\x04":
            with found.noting(path.name):
                check_crcs(file)
    if not start:
        raise Damaged("empty")
    found.add(prefix, load(path, mmap=start == b"PK\x03\x04"))


def read_safetensors(path: Path, found: Contents, prefix: str = "") -> None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = 8 + struct.unpack("<Q", file.read(8))[0] if size >= 8 else 8
        if start > size or size < 8:
            raise Damaged("cut off in its header")
        header: dict[str, Any] = json.loads(file.read(start - 8))
        found.add(prefix, header.pop("__metadata__", {}))
        end = start + max((item["data_offsets"][1] for item in header.values()), default=0)
        if end != size:
            raise Damaged(f"{size} bytes, where its header says {end}")
        for name, item in header.items():
            begin, end = item["data_offsets"]
            file.seek(start + begin)
            kind = f"{_SAFETENSORS.get(item['dtype'], item['dtype'])} {tuple(item['shape'])}"
            found.tensors[prefix + name] = digest(kind.encode(), file.read(end - begin))


def read_dir(folder: Path, found: Contents, prefix: str = "") -> None:
    for path in sorted(folder.iterdir()):
        with found.noting(prefix + path.name):
            if path.is_dir():
                read = read_dcp if kind(path) == "dcp" else read_dir
                read(path, found, f"{prefix}{path.name}/")
            elif kind(path) == "torch":
                read_torch(path, found, f"{prefix}{path.name}:")
            elif kind(path) == "safetensors":
                read_safetensors(path, found, f"{prefix}{path.name}:")
            elif path.suffix == ".json":
                values = json.loads(path.read_bytes())
                plain = {key: value for key, value in values.items() if not isinstance(value, (dict, list))}
                found.add(f"{prefix}{path.name}:", plain)


def kind(path: Path) -> str | None:
    """dcp, torch, safetensors or dir; None: no checkpoint, and not a part of one."""
    if path.is_dir():
        if (path / ".metadata").exists() or any(path.glob("*.distcp")):
            return "dcp"
        return "dir" if _NUMBERED.search(path.name) else None
    return "safetensors" if path.suffix == ".safetensors" else "torch" if path.suffix in _TORCH_FILES else None


def step_of(path: Path, found: Contents) -> int | None:
    """From the contents where a framework counts there, else from the name; Accelerate's `checkpoint_3` is no step."""
    values = {name: value for name, value in found.values.items() if "random_states" not in name}  # it counts otherwise
    counted = {re.split(r"[:/]", name)[-1]: value for name, value in sorted(values.items())}
    named = _NUMBERED.search(path.name)
    by_name = int(named["number"]) if named else None
    inside = [int(counted[key]) for key in sorted(_STEP_KEYS) if counted.get(key, "").isdecimal()]
    if named and named["word"] not in ("checkpoint", "ckpt"):
        return by_name
    return inside[0] if inside else by_name


def read(path: Path, root: Path) -> Checkpoint:
    form, found = kind(path) or "dir", Contents()
    readers = {"dcp": read_dcp, "torch": read_torch, "safetensors": read_safetensors, "dir": read_dir}
    with found.noting(path.name):
        readers[form](path, found)
    if not (found.tensors or found.values or found.problems):
        found.problems.append(f"{path.name}: not opened: needs pickle" if found.unopened else f"{path.name}: empty")
        found.complete, found.loadable = bool(found.unopened), False
    if _UNFINISHED.search(path.name):
        found.problems.insert(0, f"{path.name}: its name says that it is not a finished checkpoint")
        found.complete = False
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return Checkpoint(
        os.path.relpath(path, root), form, step_of(path, found), found.complete, found.loadable,
        found.problems[0] if found.problems else None, found.unopened, found.tensors, found.values,
        sum(file.stat().st_size for file in files),
    )  # fmt: skip


def checkpoints(root: Path) -> Iterator[Path]:
    """All checkpoints under a folder. A link to one of them is not another one."""
    for path in sorted(root.iterdir()):
        if path.is_symlink() and path.resolve().is_relative_to(root.resolve()):
            continue
        if kind(path):
            yield path
        elif path.is_dir():
            yield from checkpoints(path)


def main(root: Path) -> int:
    output, sys.stdout = sys.stdout, sys.stderr  # what a library prints is not part of the inventory
    if not root.exists():
        print(f"{root}: no such file or folder", file=sys.stderr)
        return 1
    _trust_numpy()
    alone = root.is_file() or kind(root) == "dcp"
    for path in [root] if alone else checkpoints(root):
        print(json.dumps(asdict(read(path, root.parent if alone else root))), file=output, flush=True)
    return 0


def _trust_numpy() -> None:
    """Let weights-only loading make numpy arrays, which the RNG files of Transformers and Accelerate hold."""
    try:
        import numpy
        from numpy._core.multiarray import _reconstruct, scalar
    except ImportError:
        return
    kinds = [type(numpy.dtype(name)) for name in ("uint32", "int64", "float64", "float32", "uint8", "bool")]
    torch.serialization.add_safe_globals([numpy.ndarray, numpy.dtype, _reconstruct, scalar, *kinds])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
