"""Runs a function in its own process, so that its memory is freed when it ends. A game day needs no more memory for
many rounds than for one."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from torchaos.harness.contracts import ChaosError

T = TypeVar("T")
_FORK = get_context("fork")  # fork is safe with one thread, and imports no module again


def apart(work: Callable[[], T]) -> T:
    """Returns the result of `work`, which runs in a child process. Raises the exceptions of `work`, and ChaosError if
    the process died."""
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_send, args=(theirs, work))
    process.start()
    theirs.close()
    try:
        found, error = ours.recv()
    except EOFError:
        process.join()
        raise ChaosError(f"the process that was to score the round died with exit code {process.exitcode}") from None
    process.join()
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


def _send(end: Connection, work: Callable[[], object]) -> None:
    try:
        end.send((work(), None))
    except Exception as error:  # the caller raises the exception
        end.send((None, error))
