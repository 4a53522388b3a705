"""One collective that a rank is about to start, as faults and triggers see it. What is dear is read when asked."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable, Sequence

from .plan import Collectives


class Call:
    """`instead` and `after` are for faults: what is done in the collective's place, and what right after it started."""

    def __init__(self, op: str, args: Sequence[Any], group: Callable[[], Any], packet: Any) -> None:
        self.op, self.args, self.packet = op, args, packet
        self._group = group
        self.instead: Callable[[Callable[[], Any]], Any] | None = None
        self.after: Callable[[], None] | None = None

    @cached_property
    def group(self) -> Any:
        """torch's ProcessGroup; None where there is none to be found."""
        try:
            return self._group()
        except Exception:
            return None

    @property
    def group_name(self) -> str:
        return str(getattr(self.group, "group_name", "?"))

    @cached_property
    def bytes(self) -> int:
        """The larger of what goes in and what comes out on this rank."""
        return 0 if self.op == "barrier" else max(map(_bytes, self.args), default=0)

    @property
    def has_work(self) -> bool:
        """Whether the caller gets a Work to wait for: not from functional ones."""
        return "Work" in str(self.packet._schema.returns[-1].type)

    def left_out(self) -> Any:
        """For `instead`: the collective is never started, and the caller goes on as if it had been done."""
        from . import mismatch

        return mismatch.left_out(self)

    def kept_back(self, through: Callable[[], Any], site: Any, patience_s: float, started: Any) -> Any:
        """For `instead`: it is started after the next one, or after `patience_s` when none comes."""
        from . import mismatch

        return mismatch.kept_back(self, through, site.at_collectives, patience_s, started)

    def told(self) -> dict[str, Any]:
        """What an event says about it."""
        return {"operation": self.op, "group": self.group_name, "bytes": self.bytes}

    @property
    def on_cpu(self) -> bool:
        tensor = next((one for one in map(_tensor, self.args) if one is not None), None)
        return tensor is not None and bool(tensor.is_cpu)

    def matches(self, wanted: Collectives) -> bool:
        if wanted.operation is not None and wanted.operation != self.op:
            return False
        if wanted.group is not None and wanted.group not in (self.group_name, getattr(self.group, "group_desc", None)):
            return False
        if wanted.min_bytes is not None and self.bytes < wanted.min_bytes:
            return False
        return wanted.max_bytes is None or self.bytes <= wanted.max_bytes


def _bytes(value: Any) -> int:
    """Of a tensor, or of all in a list (of lists)."""
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _tensor(value: Any) -> Any:
    """A tensor, or the first one in a list (of lists); None where there is none."""
    while isinstance(value, (list, tuple)):
        if not value:
            return None
        value = value[0]
    return value if hasattr(value, "is_cpu") else None
