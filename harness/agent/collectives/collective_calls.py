"""A collective, or a send or recv, that a rank is about to start, as faults and triggers see it. Fields that are costly
to compute are computed when they are read.

A fault may leave a collective out or start it late, so that this rank no longer matches the others. The caller must
still get what it expects: its tensors, and a Work object to wait for. This Work is made from a future that is complete
at once, or when the real collective has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from ...protocol.agent_plan import Collectives
from ...protocol.collective_stamps import MESSAGES
from ..job_signals import raise_if_of_the_job


class Call:
    """One call of a collective. A fault may set `instead`, which is called in place of the collective, and `after`,
    which is called once the collective has started."""

    def __init__(self, op: str, args: Sequence[Any], group: Callable[[], Any], packet: Any) -> None:
        self.op, self.args, self.packet = op, args, packet
        self._group = group
        self.instead: Callable[[Callable[[], Any]], Any] | None = None
        self.after: Callable[[], object] | None = None

    @cached_property
    def group(self) -> Any:
        """The ProcessGroup of torch, or None if it can't be found."""
        try:
            return self._group()
        except Exception as error:
            raise_if_of_the_job(error)
            return None

    @property
    def group_name(self) -> str:
        return str(getattr(self.group, "group_name", "?"))

    @cached_property
    def pair(self) -> tuple[int, int] | None:
        """The source and the destination of a send or recv, as global ranks. None for a collective, for a recv that
        takes what comes from any rank, and if torch does not know the ranks of the group."""
        names = [argument.name for argument in self.packet._schema.arguments]
        at = names.index("dst") if "dst" in names else names.index("src") if "src" in names else None
        if self.op not in MESSAGES or at is None:
            return None
        try:
            other = import_module("torch.distributed").get_global_rank(self.group, self.args[at])
            own = import_module("torch.distributed").get_rank()
        except Exception as error:
            raise_if_of_the_job(error)
            return None
        return (own, other) if self.op == "send" else (other, own)

    @cached_property
    def bytes(self) -> int:
        """The larger of the collective's input and output on this rank, in bytes."""
        return 0 if self.op == "barrier" else max(map(_bytes, self.args), default=0)

    @property
    def has_work(self) -> bool:
        """Whether the caller gets a Work object to wait for. Functional collectives return a tensor instead."""
        return "Work" in str(self.packet._schema.returns[-1].type)

    def left_out(self) -> Any:
        """What the caller gets from a collective that is never started but seems to be done: its own tensors,
        unchanged. For use in `instead`."""
        torch: Any = import_module("torch")
        if not self.has_work:
            return _like(torch, self)
        future = torch.futures.Future()
        future.set_result(_tensors(self))
        return _answer(self, future)

    def kept_back(
        self, through: Callable[[], Any], site: Any, patience_s: float, started: Callable[[str | None], None]
    ) -> Any:
        """Starts this collective (`through`) after the rank's next collective, or after `patience_s` seconds. Returns
        what the caller gets. For use in `instead`. Functional collectives are not delayed.

        Right before the start, calls `started` with the name of the next collective, or with None after `patience_s`
        seconds. Not after the start, because the wrong order may kill the rank at once."""
        torch: Any = import_module("torch")
        if not self.has_work:  # functional: its result must exist at once
            started(None)
            return through()
        future, once = torch.futures.Future(), threading.Lock()

        def start() -> None:
            result = through()
            threading.Thread(target=_finish, args=(result, future, self), name="torchaos", daemon=True).start()

        def on_next(other: Call) -> None:
            if other is not self and once.acquire(blocking=False):
                started(other.op)
                other.after = start

        def none_came() -> None:
            if once.acquire(blocking=False):
                started(None)
                start()

        site.at_collectives(on_next)
        timer = threading.Timer(patience_s, none_came)
        timer.daemon = True
        timer.start()
        return _answer(self, future)

    def event_data(self) -> dict[str, Any]:
        """The fields that describe this collective in an event."""
        return {"operation": self.op, "group": self.group_name, "bytes": self.bytes}

    @property
    def on_cpu(self) -> bool:
        first = next((tensor for tensor in map(_tensor, self.args) if tensor is not None), None)
        return first is not None and bool(first.is_cpu)

    def matches(self, wanted: Collectives) -> bool:
        """Whether the filter accepts this call. A send or recv is no collective, so the filter must ask for it by
        name."""
        if wanted.operation != self.op and (wanted.operation is not None or self.op in MESSAGES):
            return False
        if wanted.group is not None and wanted.group not in (self.group_name, getattr(self.group, "group_desc", None)):
            return False
        if wanted.min_bytes is not None and self.bytes < wanted.min_bytes:
            return False
        return wanted.max_bytes is None or self.bytes <= wanted.max_bytes


def _bytes(value: Any) -> int:
    """The bytes of a tensor, or of all tensors in a (nested) list."""
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    if not hasattr(type(value), "nbytes"):  # not a tensor; a ScriptObject takes 10 us to say that it has no such field
        return 0
    size = value.nbytes
    return size if isinstance(size, int) else 0


def _tensor(value: Any) -> Any:
    """The tensor itself, or the first tensor of a (nested) list. None if there is none."""
    while isinstance(value, (list, tuple)):
        if not value:
            return None
        value = value[0]
    return value if hasattr(type(value), "is_cpu") else None


def _finish(result: Any, future: Any, call: Call) -> None:
    c10d: Any = import_module("torch._C._distributed_c10d")
    work = c10d.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)
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
    """The result that the caller of a functional collective gets if the collective is never started: zeros in the shape
    of the result. For an in-place collective: the caller's own tensor."""
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
