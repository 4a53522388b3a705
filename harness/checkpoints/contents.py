"""What is found in one checkpoint: digests of its tensors, its values, and what is wrong with it.

Standard library and torch only, see reader.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import struct
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Iterator

import torch


class Damaged(Exception):
    """Bytes are missing: it was cut off, or never written to the end."""


class BadCrc(Exception):
    """It loads, but its bytes are not those that were written. torch itself never compares the CRCs."""


class Unsafe(Exception):
    """Only unpickling, which can run any code, would open it."""


@dataclass
class Contents:
    """What has been found so far in one checkpoint."""

    tensors: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unopened: list[str] = field(default_factory=list)
    complete: bool = True
    loadable: bool = True

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note what goes wrong inside rather than raise it, so that the rest is still read."""
        try:
            yield
        except Unsafe:
            self.unopened.append(what)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.problems.append(f"{what}: {lines[0][:200]}")
            self.complete &= not isinstance(error, (Damaged, FileNotFoundError))
            self.loadable &= isinstance(error, BadCrc)

    def add(self, name: str, value: Any) -> None:
        """One value, or all in a nest of them."""
        if isinstance(value, torch.Tensor):
            self.tensors[name] = tensor_digest(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.add(f"{name}.{key}" if name and not name.endswith(":") else f"{name}{key}", item)
        elif isinstance(value, (list, tuple)):
            if len(value) > 16 and all(isinstance(item, (int, float)) for item in value):
                self.values[name] = f"{len(value)} numbers, digest {digest(repr(value).encode())}"
            else:
                for index, item in enumerate(value):
                    self.add(f"{name}.{index}", item)
        elif hasattr(value, "tobytes"):  # numpy
            self.tensors[name] = digest(f"{value.dtype} {tuple(value.shape)}".encode(), value.tobytes())
        else:
            text = repr(value)
            short = len(text) <= 100 and " object at 0x" not in text
            self.values[name] = text if short else f"{type(value).__name__}, digest {digest(text.encode())}"


def digest(*parts: Any) -> str:
    summary = hashlib.blake2b(digest_size=8)
    for part in parts:
        summary.update(part)
    return summary.hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    tensor = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach().contiguous()
    name = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.").encode()
    size = tensor.numel() * tensor.element_size()
    # Not by way of numpy, which the job may not have, and which knows no bfloat16.
    return digest(name, (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"")


def check_crcs(data: BinaryIO) -> None:
    """Raises BadCrc or Damaged. A torch.save file is a zip; where torch was told to write no CRCs, none at all fits."""
    try:
        with zipfile.ZipFile(data) as archive:
            names = archive.namelist()
            bad = [name for name in names if not _fits(archive, name)]
    except (zipfile.BadZipFile, struct.error, EOFError) as error:
        raise Damaged(f"not a whole torch.save file ({error})") from error
    if bad and len(bad) < len(names):
        raise BadCrc(f"the bytes of {bad[0]} are not those that were written: the CRC differs")


def _fits(archive: zipfile.ZipFile, name: str) -> bool:
    try:
        with archive.open(name) as record:
            while record.read(1 << 20):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def load(source: Any, mmap: bool = False) -> Any:
    """torch.load with nothing but tensors and plain values. Raises Unsafe where that is not enough."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise Unsafe("not opened: needs pickle") from error
