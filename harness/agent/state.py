"""What the training state is, in a few bytes: check sums of the parameters and of the optimizers' moments after each
step and before the first, and the gradient's norm. See check_sums.py for what a check sum is.

A check sum tells that two runs differ, and not by how much. A *sketch* does: the norm of all parameters, and SUMS sums
over them, each with other signs, one per parameter. Where two runs differ, each sum differs by about the norm of the
difference (Johnson and Lindenstrauss).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from .agent import Agent
from .check_sums import SHARD, check_sum, is_whole, local
from .tally import Shown
from .wire import Kind

_MOST_MOMENTS = 16  # of one parameter
SPIKE, MEMORY = 10.0, 20  # a norm over so many times the mean of so many steps before is told of at once
SUMS = 8  # of a sketch


class StateHook:
    def __init__(self, agent: Agent) -> None:
        careful = agent.careful("state")
        self._agent, self._torch = agent, import_module("torch")
        self._norms: deque[float] = deque(maxlen=MEMORY)
        self._loads = -1  # before the last backward; then came none: the parameters are what the process began with
        self.backward_over, self.step_over = careful(self._note_norm), careful(self._note_parameters)

    def _note_norm(self) -> None:
        torch = self._torch
        grads = [local(one.grad) for one in parameters(self._agent.optimizers) if one.grad is not None]
        if self._loads != self._agent.loads:
            self._loads, self._agent.tally.now.before = self._agent.loads, self._shown()
        with torch.no_grad():
            if grads:  # at once, since the step may never be over
                norm = self._agent.tally.now.norm = float(torch.linalg.vector_norm(_norms(torch, grads)))
                self._tell_of_spike(norm)

    def _tell_of_spike(self, norm: float) -> None:
        usual = sum(self._norms) / len(self._norms) if len(self._norms) >= 3 else math.inf
        if math.isfinite(norm) and norm <= SPIKE * usual:
            self._norms.append(norm)
        else:
            self._agent.emit(Kind.NOTE, {"text": f"the norm of the gradient is {norm:.6g}", "norm": norm})

    def _note_parameters(self) -> None:
        shown = self._shown()
        if shown is not None:
            self._agent.saw("state")
            self._agent.tally.now.after = shown

    def _shown(self) -> Shown | None:
        torch, optimizers = self._torch, self._agent.optimizers
        found = parameters(optimizers)
        if not found:
            return None
        kept = check_sum(torch, list(moments(optimizers)))
        if is_whole(kept) and any(map(is_shared_out, optimizers)):
            kept = SHARD + kept
        return Shown(check_sum(torch, list(enumerate(found))), kept, self._sketch(found))

    def _sketch(self, whole: Sequence[Any]) -> list[float]:
        torch, found = self._torch, [local(one).detach() for one in whole]
        real = [torch.view_as_real(one) if one.is_complex() else one for one in found]
        exact = torch.float32 if any(one.device.type == "mps" for one in real) else torch.float64
        with torch.no_grad():
            sums = torch.stack([one.sum(dtype=exact) for one in real]).tolist()
            norms = _norms(torch, real).tolist()
        return [math.hypot(*norms), *(math.fsum(_signed(sums, number)) for number in range(1, SUMS + 1))]


def _norms(torch: Any, tensors: Sequence[Any]) -> Any:
    """Of each tensor: in float32, or in float64 where one of them is in that, which torch refuses to narrow."""
    plain = [one.detach().coalesce().values() if one.is_sparse else one.detach() for one in tensors]
    real = [torch.view_as_real(one) if one.is_complex() else one for one in plain]
    wide = torch.float64 if any(one.dtype == torch.float64 for one in real) else torch.float32
    return torch.stack([torch.linalg.vector_norm(one, dtype=wide) for one in real])


def _signed(sums: list[float], number: int) -> list[float]:
    """With the signs of a Walsh function: any two of these differ in half of the places."""
    return [-one if (place & number).bit_count() % 2 else one for place, one in enumerate(sums)]


def parameters(optimizers: Sequence[Any]) -> list[Any]:
    """What these optimizers train, each once, in order."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return list({id(one): one for group in groups for one in group}.values())


def moments(optimizers: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """What these optimizers keep of each parameter, such as Adam's two averages, with a place for each."""
    for place, one in enumerate(parameters(optimizers)):
        # ZeroRedundancyOptimizer has None for what another rank keeps.
        states = (state for optimizer in optimizers if (state := optimizer.state.get(one)) is not None)
        kept = {name: value for state in states for name, value in state.items() if getattr(value, "ndim", 0)}
        yield from ((_MOST_MOMENTS * place + number, kept[name]) for number, name in enumerate(sorted(kept)))


def is_shared_out(optimizer: Any) -> bool:
    """Whether each rank keeps the moments of other parameters, as with ZeroRedundancyOptimizer (ZeRO, stage 1): it
    holds an optimizer that trains only some of its parameters."""
    inner = getattr(optimizer, "optim", None)
    if not hasattr(inner, "param_groups"):
        return False
    own, all_ = ({id(one) for one in parameters([which])} for which in (inner, optimizer))
    return own < all_
