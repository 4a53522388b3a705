"""The learning rates of optimizers of plain classes, such as the Muon of many scripts: objects with a method `step`
that keep a list of parameters, and a rate in `param_groups` or in an attribute.

They are searched among all objects when a backward begins and no optimizer has stepped. Their `step` is wrapped in
their class, because the rate must be read in the step: the loop may set another one before it trains on."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ..agent import Agent
from ..state.tensor_names import may_optimize
from .learning_rates import as_number

_LOOKS = 4  # at most
_NAMES = ("lr", "learning_rate")
_MOST = 64  # rates


class PlainOptimizers:
    def __init__(self, agent: Agent) -> None:
        self._agent, self._torch, self._looks = agent, import_module("torch"), 0
        self._kinds: set[type] = set()  # whose `step` is wrapped
        # By id: each object that has stepped, and whether it is such an optimizer.
        self._known: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self._steps = agent.careful("lr")(self._step_begins)

    def look(self) -> None:
        """Finds such optimizers, and wraps their `step`. Must be called when a backward begins and no optimizer has
        stepped."""
        if self._looks == _LOOKS or self._kinds:
            return
        self._looks += 1
        optimizer, may = self._torch.optim.Optimizer, dict[type, bool]()
        for each in gc.get_objects():
            kind = type(each)
            if kind not in may:
                may[kind] = may_optimize(kind) and not issubclass(kind, optimizer)
            if may[kind] and kind not in self._kinds and self._trains(each):
                self._cover(kind)

    def _cover(self, kind: type) -> None:
        owner: Any = next(base for base in kind.__mro__ if "step" in vars(base))
        original, agent, steps = vars(owner)["step"], self._agent, self._steps
        self._kinds.add(kind)
        if not inspect.isfunction(original):
            return

        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if agent.on and "lr" in agent.live:
                steps(optimizer)
            return original(optimizer, *args, **kwargs)

        owner.step = step

    def _step_begins(self, optimizer: Any) -> None:
        known, trains = self._known.get(id(optimizer), (None, False))
        if known is None or known() is not optimizer:
            trains = self._trains(optimizer)
            self._known[id(optimizer)] = weakref.ref(optimizer), trains
        rates = self._agent.tally.now.lr
        if trains and len(rates) < _MOST:
            self._agent.unseen.discard("lr")
            rates += map(as_number, list(_rates(optimizer))[:_MOST])

    def _trains(self, each: Any) -> bool:
        """Whether this is an optimizer with a rate, of parameters that no optimizer of torch's has. An object that
        contains one of torch's is a wrapper."""
        values = list(vars(each).values())
        if any(isinstance(value, self._torch.optim.Optimizer) for value in values) or not [*_rates(each)]:
            return False
        of_torch = {id(own) for one in self._agent.optimizers for group in one.param_groups for own in group["params"]}
        own = [one for value in values for one in _in_list(value) if isinstance(one, self._torch.nn.Parameter)]
        return bool(own) and not any(id(one) in of_torch for one in own)


def _rates(optimizer: Any) -> Iterator[Any]:
    """The rate of each parameter group; the attribute, if there is none."""
    groups = vars(optimizer).get("param_groups")
    found = [group["lr"] for group in groups if isinstance(group, Mapping) and "lr" in group] if isinstance(
        groups, (list, tuple)) else []  # fmt: skip
    for value in found or [vars(optimizer).get(name) for name in _NAMES]:
        if (isinstance(value, (int, float)) and not isinstance(value, bool)) or getattr(value, "numel", int)() == 1:
            yield value


def _in_list(value: Any) -> Iterator[Any]:
    """What is in a list, or in the groups in it, or the values of a mapping."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        if isinstance(each, dict) and isinstance(each.get("params"), (list, tuple)):
            yield from each["params"]
        else:
            yield each
