"""Finds by how much an optimizer's own step counter is ahead of the training, when training begins. Some frameworks
create the optimizer's state by a step with gradients of zero (DeepSpeed, torch's `set_optimizer_state_dict`), and some
optimizers do not begin to count with 1. This says something about the counter only if its state was not restored: then
the counter was restored too, and what it counted is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .rates import optimizer_step
from .wire import Kind

if TYPE_CHECKING:
    from .agent import Agent


class Ahead:
    """`waiting`: the id of the optimizer whose first training step has begun and has not been reported."""

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
