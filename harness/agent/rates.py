"""Learning rates, and the step counters of optimizers and schedulers. They are witnesses of the step at which a resumed
job starts."""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent import Agent

_MAX_GROUPS = 64
# These classes don't call LRScheduler's __init__, and contain or replace other schedulers.
_OUTER = ("SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")


class Rates:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # The optimizer and its scheduler, by the id of the optimizer: a WeakKeyDictionary takes ten times longer.
        self._schedulers: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
        self._bind = agent.careful("lr")(self._bind_scheduler)

    def patch(self, module: ModuleType) -> None:
        """Patches torch.optim.lr_scheduler."""
        for name in ("LRScheduler", *_OUTER):
            scheduler = getattr(module, name, None)
            if scheduler is not None and "__init__" in scheduler.__dict__:
                self._cover_init(scheduler)

    def _cover_init(self, kind: Any) -> None:
        original = kind.__init__

        @functools.wraps(original)
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            self._bind(scheduler)

        kind.__init__ = __init__

    def _bind_scheduler(self, scheduler: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        for bound in (optimizer, getattr(optimizer, "optimizer", None)):  # Accelerate wraps the optimizer that steps
            if bound is not None:  # an outer scheduler is made after the schedulers that it holds, so it replaces them
                self._schedulers[id(bound)] = weakref.ref(bound), weakref.ref(scheduler)

    def rates(self, optimizer: Any) -> list[float | None]:
        """The learning rate of each parameter group, as the current step uses it. None for a rate that is on a GPU."""
        self._agent.unseen.discard("lr")
        found: list[float | None] = []
        for group in optimizer.param_groups[:_MAX_GROUPS]:
            rate = group.get("lr")
            found.append(rate if type(rate) is float else _number(rate))
        return found

    def scheduler_step(self, optimizer: Any) -> int | None:
        """The scheduler's step counter, before the scheduler steps for this iteration. None without a scheduler."""
        bound, reference = self._schedulers.get(id(optimizer), (None, None))
        if bound is None or reference is None or bound() is not optimizer:
            return None
        scheduler = reference()
        value = getattr(scheduler, "last_epoch", None)
        if value is None and (inner := getattr(scheduler, "_schedulers", None)):
            value = getattr(inner[0], "last_epoch", None)
        return value if isinstance(value, int) else None


def optimizer_step(optimizer: Any) -> int | None:
    """The step counter of the first parameter that has a counter, among the first five parameters of the optimizer.
    None if none of them has a counter, or if the counter is not in CPU memory."""
    state = getattr(optimizer, "state", None) or {}
    for checked, entry in enumerate(state.values()):
        if isinstance(entry, dict) and "step" in entry:
            value = _number(entry["step"])
            return None if value is None else int(value)
        if checked == 4:
            break
    return None


def _number(value: Any) -> float | None:
    if value is None or (hasattr(value, "is_cpu") and (not value.is_cpu or value.numel() != 1)):
        return None
    return float(value)
