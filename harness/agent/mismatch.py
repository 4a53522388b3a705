"""Collectives that are left out or started too late, so that this rank no longer matches the others.

The caller must get what it expects of a collective: its tensors, and a Work to wait for. Here the Work is one made of a
future, which is complete at once, or when the real one is that was started later.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any, Callable

from .calls import Call


def left_out(call: Call) -> Any:
    """What the caller gets of a collective that is never started: its own tensors, as they are."""
    torch: Any = import_module("torch")
    if not call.has_work:
        return _like(torch, call)
    future = torch.futures.Future()
    future.set_result(_tensors(call))
    return _answer(call, future)


def kept_back(
    call: Call, through: Callable[[], Any], at_collectives: Callable[[Callable[[Call], None]], None],
    patience_s: float, started: Callable[[str | None], None],
) -> Any:  # fmt: skip
    """Start the collective after the next one, or after `patience_s` when none comes. `started` gets the next one's
    operation right before that starts, since a rank may die of the wrong order at once; or None."""
    torch: Any = import_module("torch")
    if not call.has_work:  # functional: what it returns must be there at once
        started(None)
        return through()
    future, once = torch.futures.Future(), threading.Lock()

    def start() -> None:
        result = through()
        threading.Thread(target=_finish, args=(result, future, call), name="torchaos", daemon=True).start()

    def next_one(other: Call) -> None:
        if other is not call and once.acquire(blocking=False):
            started(other.op)
            other.after = start

    def none_came() -> None:
        if once.acquire(blocking=False):
            started(None)
            start()

    at_collectives(next_one)
    timer = threading.Timer(patience_s, none_came)
    timer.daemon = True
    timer.start()
    return _answer(call, future)


def _finish(result: Any, future: Any, call: Call) -> None:
    work = _work_type().unbox(result[-1] if isinstance(result, (tuple, list)) else result)
    try:
        work.wait()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(_tensors(call))


def _answer(call: Call, future: Any) -> Any:
    c10d: Any = import_module("torch._C._distributed_c10d")
    work = c10d._create_work_from_future(future).boxed()
    return work if len(call.packet._schema.returns) == 1 else (call.args[0], work)


def _work_type() -> Any:
    return import_module("torch._C._distributed_c10d").Work


def _tensors(call: Call) -> list[Any]:
    found: list[Any] = []
    todo = [call.args[0]]
    while todo:
        one = todo.pop(0)
        if isinstance(one, (list, tuple)):
            todo = [*one, *todo]
        else:
            found.append(one)
    return found


def _like(torch: Any, call: Call) -> Any:
    """Zeros of the shape that a functional collective returns; of one in place, what went in."""
    if call.packet._schema.name.endswith(("_", "_out")):
        return call.args[-1] if call.packet._schema.name.endswith("_out") else call.args[0]

    def meta(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [meta(one) for one in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    def real(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [real(one) for one in value]
        return torch.zeros(value.shape, dtype=value.dtype, device=_tensors(call)[0].device)

    return real(call.packet(*map(meta, call.args)))
