"""What lies in a checkpoint folder, tensor by tensor: `take` for the harness, and the program that it runs for that.

Reading takes the job's torch, which the harness never imports, so `take` runs this file with the job's Python; that
is also why it imports only the standard library and torch. Nothing is unpickled that could run code, and all digests
are of values, not of files, so that two checkpoints with equal contents are equal whatever their layout.

Formats: DCP folders as torch.distributed.checkpoint.FileSystemWriter writes them (`.metadata` and `*.distcp`), files of
torch.save, safetensors (https://github.com/huggingface/safetensors#format), and folders of such files.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import io
import json
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator

TORCH_FILES = {".pt", ".pth", ".ckpt", ".bin", ".pkl"}
_UNFINISHED = re.compile(r"^\.|^tmp[-_]|[._-](partial|tmp|temp|incomplete|writing|damaged|corrupt)\b")
_CHECKPOINT = re.compile(r"(checkpoint|ckpt|epoch|(?P<step>step|iter|iteration))[-_=]?(?P<number>\d+)")
_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def take(path: Path, python: str, timeout_s: float = 300.0) -> dict[str, Any]:
    """The inventory of all checkpoints under `path`, read by the interpreter `python`, which has the job's torch.

    {"root", "checkpoints": [fields of `Checkpoint`], "problem": why it is not all, or None}. Raises nothing.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    problem, output = None, ""
    try:
        done = subprocess.run(
            [python, __file__, str(path)], capture_output=True, text=True, timeout=timeout_s, env=environment
        )
        output = done.stdout
        if done.returncode:
            problem = (done.stderr.strip().splitlines() or [f"the reader ended with {done.returncode}"])[-1]
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        problem = f"not read within {timeout_s:g} s"
    except OSError as error:
        problem = f"{python}: {error.strerror}"
    whole = [line for line in output.splitlines(keepends=True) if line.endswith("\n")]
    return {"root": str(path), "checkpoints": [json.loads(line) for line in whole], "problem": problem}


class Damaged(Exception):
    """A checkpoint that is not what was written, or not all of it."""


@dataclass
class Contents:
    """What is in a file or folder. Names are the nested keys, joined by dots."""

    tensors: dict[str, str] = field(default_factory=dict)  # digest of type, shape and bytes
    values: dict[str, str] = field(default_factory=dict)  # repr, or a digest of what is long
    problems: list[str] = field(default_factory=list)
    missing: bool = False  # a part of it is not there
    unread: bool = False  # a part of it can't be loaded, or was not

    def add(self, name: str, value: Any) -> None:
        import torch

        if isinstance(value, torch.Tensor):
            self.tensors[name] = tensor_digest(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.add(f"{name}.{key}" if name else str(key), item)
        elif isinstance(value, (list, tuple, set)):
            if len(value) > 16 and all(isinstance(item, (int, float)) for item in value):
                self.values[name] = f"{len(value)} numbers {digest(repr(value).encode())}"
            else:
                for index, item in enumerate(value):
                    self.add(f"{name}.{index}", item)
        elif hasattr(value, "tobytes"):  # numpy
            self.tensors[name] = digest(f"{value.dtype} {tuple(value.shape)}".encode(), value.tobytes())
        elif isinstance(value, (bytes, bytearray)):
            self.values[name] = f"{len(value)} bytes {digest(value)}"
        else:
            text = repr(value)
            self.values[name] = text if len(text) <= 200 else f"{type(value).__name__} {digest(text.encode())}"

    def include(self, prefix: str, other: Contents) -> None:
        self.tensors |= {f"{prefix}:{name}": value for name, value in other.tensors.items()}
        self.values |= {f"{prefix}:{name}": value for name, value in other.values.items()}
        self.problems += [f"{prefix}: {problem}" for problem in other.problems]
        self.missing, self.unread = self.missing or other.missing, self.unread or other.unread


@dataclass(frozen=True)
class Checkpoint:
    path: str  # relative to the root
    format: str  # dcp, torch, safetensors, dir
    step: int | None  # from its contents or its name
    complete: bool  # nothing that it names is missing, and its own name doesn't say that it is unfinished
    loadable: bool  # all of it could be read
    problem: str | None
    tensors: dict[str, str]
    values: dict[str, str]
    bytes: int


def digest(*parts: Any) -> str:
    summary = hashlib.blake2b(digest_size=8)
    for part in parts:
        summary.update(part)
    return summary.hexdigest()


def tensor_digest(tensor: Any) -> str:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        tensor = tensor.to_dense() if not tensor.is_quantized else tensor.dequantize()
    tensor = tensor.detach().cpu().contiguous()
    name = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.").encode()
    size = tensor.numel() * tensor.element_size()
    # Not by way of numpy, which the job may not have and which lacks bfloat16.
    return digest(name, (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"")


def check_zip(data: BinaryIO) -> None:
    """Compare the CRCs of a torch.save file, which torch itself never does. Raises Damaged.

    torch can be told not to write them (torch.serialization.set_crc32_options); then none at all fits.
    """
    try:
        with zipfile.ZipFile(data) as archive:
            names = archive.namelist()
            bad = [name for name in names if not _crc_fits(archive, name)]
    except (zipfile.BadZipFile, EOFError, struct.error) as error:
        raise Damaged(f"no whole torch.save file: {error}") from error
    if bad and len(bad) < len(names):
        raise Damaged(f"the CRC of {bad[0]} does not fit its bytes")


def _crc_fits(archive: zipfile.ZipFile, name: str) -> bool:
    try:
        with archive.open(name) as record:
            while record.read(1 << 20):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def load(source: Any, **options: Any) -> Any:
    import torch

    try:
        return torch.load(source, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error).lower() or "weights only" in str(error).lower():
            raise Unsafe("not opened: needs pickle") from error
        raise


class Unsafe(Exception):
    """Only unpickling, which runs code, would open it."""


def read_torch(path: Path) -> Contents:
    found = Contents()
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
        if zipped:
            with guarded(found):
                check_zip(file)
    if not zipped and path.stat().st_size == 0:
        raise Damaged("empty")
    found.add("", load(path, mmap=zipped))
    return found


class guarded:
    """Notes what goes wrong inside instead of raising it, so that the rest is still read."""

    def __init__(self, found: Contents, name: str = "") -> None:
        self.found, self.prefix = found, f"{name}: " if name else ""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception):
            return error is None
        reason = str(error).strip().splitlines() or [type(error).__name__]
        self.found.problems.append(self.prefix + reason[0])
        self.found.missing |= isinstance(error, (FileNotFoundError, Damaged)) and not reason[0].startswith("the CRC")
        self.found.unread |= not (isinstance(error, Damaged) and reason[0].startswith("the CRC"))
        return True


def read_safetensors(path: Path) -> Contents:
    found = Contents()
    with open(path, "rb") as file:
        size = path.stat().st_size
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        if 8 + length > size:
            raise Damaged("the header is cut off")
        header: dict[str, Any] = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        if 8 + length + max((item["data_offsets"][1] for item in header.values()), default=0) != size:
            raise Damaged("shorter or longer than its header says")
        for name, item in header.items():
            begin, end = item["data_offsets"]
            file.seek(8 + length + begin)
            kind = _SAFETENSORS.get(item["dtype"], item["dtype"])
            found.tensors[name] = digest(f"{kind} {tuple(item['shape'])}".encode(), file.read(end - begin))
    found.values = {f"__metadata__.{key}": repr(value) for key, value in metadata.items()}
    return found
