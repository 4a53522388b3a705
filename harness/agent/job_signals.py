"""Exceptions of the job's own signal handlers, which must reach the job. Python runs a handler in the middle of any
code of the main thread, also of the agent's. So a handler that raises an exception, to leave the training loop when the
job is told to end, may raise it inside a hook. Wherever the agent catches its own errors, it lets such an exception
through."""

from __future__ import annotations

from inspect import CO_VARARGS
from itertools import pairwise
from types import FrameType


def raise_if_of_the_job(error: BaseException) -> None:
    """Raises the error again if a signal handler raised it. The agent has no handler in Python."""
    entry = error.__traceback__
    while entry is not None:
        if _is_a_handler(entry.tb_frame):
            raise error
        entry = entry.tb_next


def _is_a_handler(frame: FrameType) -> bool:
    """Whether the function was called with a number and a frame, as the `signal` module calls a handler."""
    code, given = frame.f_code, frame.f_locals
    values = [given.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        values += given.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) or ()
    return any(isinstance(number, int) and isinstance(of, FrameType) for number, of in pairwise(values))
