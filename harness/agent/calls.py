"""A collective that a rank is about to start, as faults and triggers see it. Fields that are costly to compute are
computed when they are read."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable, Sequence

from .plan import Collectives


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
        except Exception:
            return None

    @property
    def group_name(self) -> str:
        return str(getattr(self.group, "group_name", "?"))

    @cached_property
    def bytes(self) -> int:
        """The larger of the collective's input and output on this rank, in bytes."""
        return 0 if self.op == "barrier" else max(map(_bytes, self.args), default=0)

    @property
    def has_work(self) -> bool:
        """Whether the caller gets a Work object to wait for. Functional collectives return a tensor instead."""
        return "Work" in str(self.packet._schema.returns[-1].type)

    def left_out(self) -> Any:
        """A function for `instead`: never starts the collective, and lets the caller continue as if it were done."""
        from . import mismatch

        return mismatch.left_out(self)

    def kept_back(self, through: Callable[[], Any], site: Any, patience_s: float, started: Any) -> Any:
        """Returns a function that starts this collective late: after the rank has started its next collective, or after
        `patience_s` seconds. `instead` takes such a function. `started` is called when the collective starts."""
        from . import mismatch

        return mismatch.kept_back(self, through, site.at_collectives, patience_s, started)

    def event_data(self) -> dict[str, Any]:
        """The fields that describe this collective in an event."""
        return {"operation": self.op, "group": self.group_name, "bytes": self.bytes}

    @property
    def on_cpu(self) -> bool:
        first = next((tensor for tensor in map(_tensor, self.args) if tensor is not None), None)
        return first is not None and bool(first.is_cpu)

    def matches(self, wanted: Collectives) -> bool:
        if wanted.operation is not None and wanted.operation != self.op:
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
