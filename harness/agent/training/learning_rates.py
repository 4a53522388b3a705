"""Learning rates, and the step counters of optimizers and schedulers. From these counters, the harness and the agent
find the step at which a resumed job starts, and how many steps a job goes back when it loads a checkpoint between two
steps."""

from __future__ import annotations

import functools
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...protocol.wire import Kind

if TYPE_CHECKING:
    from ..agent import Agent


_MAX_GROUPS = 64
# These classes don't call LRScheduler's __init__, and contain or replace other schedulers.
_OUTER = ("SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")


class LearningRates:
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
            found.append(rate if type(rate) is float else as_number(rate))
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
            value = as_number(entry["step"])
            return None if value is None else int(value)
        if checked == 4:
            break
    return None


def as_number(value: Any) -> float | None:
    """A number or a tensor of one element as a number. None for None, and for a tensor that is not in CPU memory."""
    if value is None or (hasattr(value, "is_cpu") and (not value.is_cpu or value.numel() != 1)):
        return None
    return float(value)


class CounterOffset:
    """Reports that an optimizer's own step counter was ahead of the training when the training began. Some frameworks
    create the optimizer's state by a step with gradients of zero (DeepSpeed, torch's `set_optimizer_state_dict`), and
    some optimizers do not begin to count with 1. If the state was restored from a checkpoint, nothing is reported: the
    counter was restored too, and what it had counted is not known.

    `waiting`: the id of the optimizer whose first training step has begun and has not been reported."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._primed: dict[int, int | None] = {}  # counters after steps that train nothing, by the optimizer's id
        self.waiting: int | None = None

    def primed(self, optimizer: Any) -> None:
        """Must be called after a step that trains nothing."""
        self._primed[id(optimizer)] = optimizer_step(optimizer)

    def forget(self, key: int) -> None:
        """Must be called when a state is loaded into the optimizer with the id `key`, and when it no longer exists."""
        self._primed.pop(key, None)
        self.waiting = None if self.waiting == key else self.waiting

    def begins(self, optimizer: Any) -> None:
        """Must be called before the first step that trains."""
        was = self._primed.get(id(optimizer))
        is_new = not getattr(optimizer, "state", None) or (was is not None and was == optimizer_step(optimizer))
        self.waiting = id(optimizer) if is_new else None

    def ends(self, counter: int | None) -> None:
        """Must be called after the first step of the waiting optimizer that was not skipped."""
        self.waiting = None
        if counter is not None and counter > 1:
            self._agent.emit(Kind.AHEAD, {"steps": counter - 1})


class RollbackDetector:
    """Finds out how many steps the job went back, from the optimizers' own step counters before and after a load
    between two steps."""

    def __init__(self) -> None:
        self._place = 0  # iterations completed at the time of the load
        self._loaded = False
        self._before: dict[int, int | None] = {}  # counters before the load, by id of the optimizer
        self._by: dict[int, int | None] = {}  # by how much the counters went down, by id of the optimizer

    def loaded(self, place: int) -> None:
        self._come_to(place)
        self._loaded = True

    def puts_back(self, place: int, optimizer: Any) -> None:
        """Must be called when an optimizer is about to load a state."""
        self._come_to(place)
        self._before.setdefault(id(optimizer), optimizer_step(optimizer))

    def was_put_back(self, optimizer: Any) -> None:
        before = self._before.get(id(optimizer))
        self._by[id(optimizer)] = None if before is None else before - (optimizer_step(optimizer) or 0)

    def happened(self, place: int) -> bool:
        """Whether, after iteration `place`, the job continued from another state: it has loaded a checkpoint and an
        optimizer's state since then, or put the state with which the process began back from memory, as after a
        warm-up."""
        return place == self._place and bool(self._by) and (self._loaded or self.by == place)

    @property
    def by(self) -> int | None:
        """By how many steps the job went back; a negative number: how many steps it skipped. None if the counters do
        not show it. An optimizer without a counter, such as Muon, says nothing."""
        counts = {*self._by.values()} - {None}
        return counts.pop() if len(counts) == 1 else None

    def _come_to(self, place: int) -> None:
        if place != self._place:
            self._place, self._loaded, self._before, self._by = place, False, {}, {}
