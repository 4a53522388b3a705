"""Collectives that are left out or started too late, so that this rank no longer matches the others.

The caller must get the usual result of a collective: its tensors, and a Work to wait for. Here the Work is made from a
future. The future is complete at once, or when the real collective, which is started later, is complete."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any, Callable

from .calls import Call


def left_out(call: Call) -> Any:
    """The result for the caller of a collective that is never started: the caller's own tensors, unchanged."""
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
    """Starts the collective after the rank's next collective, or after `patience_s` seconds. Right before the start,
    `started` is called with the name of that next operation, or with None after `patience_s` seconds. It is called
    before and not after, because the wrong order may kill the rank at once. Functional collectives are not delayed."""
    torch: Any = import_module("torch")
    if not call.has_work:  # functional: its result must exist at once
        started(None)
        return through()
    future, once = torch.futures.Future(), threading.Lock()

    def start() -> None:
        result = through()
        threading.Thread(target=_finish, args=(result, future, call), name="torchaos", daemon=True).start()

    def on_next(other: Call) -> None:
        if other is not call and once.acquire(blocking=False):
            started(other.op)
            other.after = start

    def none_came() -> None:
        if once.acquire(blocking=False):
            started(None)
            start()

    at_collectives(on_next)
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
    tensors: list[Any] = []
    todo = [call.args[0]]
    while todo:
        value = todo.pop(0)
        if isinstance(value, (list, tuple)):
            todo = [*value, *todo]
        else:
            tensors.append(value)
    return tensors


def _like(torch: Any, call: Call) -> Any:
    """Zeros in the shape that a functional collective returns. For an in-place collective: its own tensor."""
    if call.packet._schema.name.endswith(("_", "_out")):
        return call.args[-1] if call.packet._schema.name.endswith("_out") else call.args[0]

    def meta(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [meta(item) for item in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    def real(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [real(item) for item in value]
        return torch.zeros(value.shape, dtype=value.dtype, device=_tensors(call)[0].device)

    return real(call.packet(*map(meta, call.args)))
