"""Reads untrusted pickles: plain containers, text and numbers only. A torn pickle is read as far as possible.

Nothing in a pickle is called: a pickle that names a class or function is refused. Memory is limited, since a few bytes
of a pickle (a memo index) can require gigabytes."""

from __future__ import annotations

import io
import pickle
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

_ROOM = 2 << 30  # bytes that unpickling may allocate


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}; a dump holds plain data only")


class _Torn(pickle._Unpickler):  # the unpickler in Python: its stack is accessible
    """Reads a pickle that ends early: open containers are closed, and the part that was read is returned."""

    find_class = _Plain.find_class
    stack: list[Any]
    metastack: list[list[Any]]

    def rescue(self) -> Any:
        with suppress(Exception):
            self.load()
        while self.metastack:
            items, self.stack = self.stack, self.metastack.pop()
            top = self.stack[-1] if self.stack else None
            if isinstance(top, list):
                top.extend(items)
            elif isinstance(top, dict):
                top.update(zip(items[::2], items[1::2], strict=False))
        return self.stack[0] if self.stack else None


def load(raw: bytes) -> tuple[Any, str]:
    """The object, and a clause about damage (empty if there is none). Raises ValueError if nothing can be read, or if
    the pickle contains anything but plain data."""
    with warnings.catch_warnings(), _bounded():
        warnings.simplefilter("ignore")
        try:
            return _Plain(io.BytesIO(raw)).load(), ""
        except (EOFError, pickle.UnpicklingError) as error:
            if "names" in str(error) or "persistent" in str(error):
                raise ValueError(str(error)) from error
            why = str(error) or "it ends early"
        except (MemoryError, RecursionError) as error:
            raise ValueError("it needs too much memory") from error
        except Exception as error:  # damaged bytes may raise nearly any error
            why = f"{type(error).__name__}: {error}"
        try:
            found = _Torn(io.BytesIO(raw)).rescue()
        except (MemoryError, RecursionError, AttributeError, TypeError):
            found = None
    if found is None:
        raise ValueError(f"it is no whole pickle: {why}")
    return found, f"it is torn: {why}"


@contextmanager
def _bounded() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + _ROOM
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
