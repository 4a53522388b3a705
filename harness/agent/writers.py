"""Wrappers for the files that a save writes to. They digest everything that is written."""

from __future__ import annotations

import io
import os
import threading
from typing import Any, Callable

from .hashing import ASIDE, Digester, Tensors
from .helper import Helper


class Tee:
    """An open file that digests everything that is written to it."""

    def __init__(self, file: Any, helper: Callable[[], Helper]) -> None:
        self._file, self._helper = file, helper
        self.digester, self.error = Digester(), ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> Any:
        try:
            view = memoryview(data).cast("B")
        except (TypeError, ValueError) as error:
            self.error = str(error)
            return self._file.write(data)
        if len(view) < ASIDE:
            self._update(view)
            return self._file.write(data)
        digested = threading.Event()

        def work() -> None:
            try:
                self._update(view)
            finally:
                digested.set()

        helper = self._helper()
        helper.do(work)
        try:
            return self._file.write(data)
        finally:
            helper.lend_a_hand(digested.is_set)
            digested.wait()  # the caller may reuse the memory

    def seek(self, *args: Any) -> Any:
        self.error = "it was not written from its beginning to its end"
        return self._file.seek(*args)

    def truncate(self, *args: Any) -> Any:
        self.error = "it was cut while it was written"
        return self._file.truncate(*args)

    def _update(self, view: memoryview) -> None:
        try:
            self.digester.update(view)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"


class WithoutDescriptor(Tee):
    """A Tee that hides its file descriptor. Otherwise torch.save, in the format from before torch 1.6, would write
    tensors directly to the descriptor, and not by `write`."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("all bytes must pass through write()")


class Records:
    """A writer of torch's zip files that also computes a digest of each entry of the zip."""

    def __init__(self, zip_file: Any, tensors: Tensors) -> None:
        self._zip_file, self._tensors = zip_file, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._zip_file, name)

    def write_record(self, name: str, data: Any, size: int) -> Any:
        if size and not isinstance(data, int):  # old versions of torch pass an address
            self._tensors.add(name, data, size)
        elif size:
            self._tensors.error = "torch gave an address only"
        return self._zip_file.write_record(name, data, size)


class Stream:
    """The context in which torch.distributed.checkpoint writes one file, with a Tee around the file."""

    def __init__(
        self, inner: Any, opened: Callable[[Any], Tee | None], closed: Callable[[Tee, os.stat_result | None], None]
    ) -> None:
        self._inner, self._opened, self._closed = inner, opened, closed
        self._tee: Tee | None = None
        self._about: os.stat_result | None = None

    def __enter__(self) -> Any:
        file = self._inner.__enter__()
        self._tee = self._opened(file)
        try:
            self._about = os.fstat(file.fileno())
        except (AttributeError, OSError, ValueError):
            pass  # the file is not on a local file system
        return file if self._tee is None else self._tee

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        result = self._inner.__exit__(kind, error, trace)
        if error is None and self._tee is not None:
            self._closed(self._tee, self._about)
        return result
