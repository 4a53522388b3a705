"""The training state in a few bytes (`StateHook`): check sums (check_sums.py) of the parameters and of the optimizers'
moments before the first step and after each step, and the norm of the gradient.

A check sum shows that two runs differ, but not by how much. A *sketch* does: it has the norm of all parameters, and
SUMS sums over the parameters. In each sum, every parameter has its own sign, + or -. If the parameters of two runs
differ, each sum differs by about the norm of the difference (Johnson and Lindenstrauss)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from ...protocol.check_sums import SHARD, check_sum, is_whole, local, stacked
from ...protocol.wire import Kind
from ..agent import Agent
from ..training.iteration import Shown
from ..training.loss import is_capturing

_MOST_MOMENTS = 16  # per parameter
SPIKE, MEMORY = 10.0, 20  # a note is written if the norm is more than SPIKE times the mean of the last MEMORY steps
SUMS = 8  # sums in a sketch


class StateHook:
    """Records the norm of the gradient after each backward, and the training state after each step."""

    def __init__(self, agent: Agent) -> None:
        careful = agent.careful("state")
        self._agent, self._torch = agent, import_module("torch")
        self._norms: deque[float] = deque(maxlen=MEMORY)
        # The numbers of loads, saves and states put back before the last backward. After these, the job may have other
        # parameters.
        self._handled: tuple[int, int, int] | None = None
        # A step whose state is not recorded yet, the loads until its end, and what was in place then.
        self._late: tuple[int, int, Shown | None] | None = None
        self.backward_over, self.step_over = careful(self._note_norm), careful(self._note_parameters)
        self.report_late = careful(self._report_late)

    def _note_norm(self) -> None:
        torch = self._torch
        if is_capturing(torch.cuda):
            return
        grads = [local(each.grad) for each in trained_by(self._agent) if each.grad is not None]
        handled = (self._agent.loads, self._agent.saves, self._agent.put_back)
        if self._handled != handled:
            self._handled, self._agent.tally.now.before = handled, self._shown()
        with torch.no_grad():
            if grads:  # now, because the step may never end
                norm = float(torch.linalg.vector_norm(_norms(torch, grads)))
                if not math.isfinite(norm) and all(grad.device.type != "mps" for grad in grads):
                    # The squares of finite gradients may overflow in float32.
                    norm = float(torch.linalg.vector_norm(_norms(torch, grads, torch.float64)))
                self._agent.tally.now.norm = norm
                self._report_spike(norm)

    def _report_spike(self, norm: float) -> None:
        usual = sum(self._norms) / len(self._norms) if len(self._norms) >= 3 else math.inf
        if math.isfinite(norm) and norm <= SPIKE * usual:
            self._norms.append(norm)
        else:
            self._agent.emit(Kind.NOTE, {"text": f"the norm of the gradient is {norm:.6g}", "norm": norm})

    def _note_parameters(self, trains: bool) -> None:
        """Must be called when a step is over. `trains` False: the job may have other values in place, so the state
        after the step is read when the job trains on, and a later event reports it."""
        if not trains:
            self._late = self._agent.steps_over + 1, self._agent.loads, self._shown()
        elif (shown := self._shown()) is not None:
            self._agent.saw("state")
            self._agent.tally.now.after = shown

    def _report_late(self) -> None:
        """Must be called when the job trains on, begins to load, or ends. If the parameters no longer exist, what was
        in place at the end of the step is reported."""
        if self._late is None:
            return
        (step, loads, then), self._late = self._late, None
        if loads == self._agent.loads and (shown := self._shown() or then) is not None:
            self._agent.saw("state")
            self._agent.emit(Kind.LOSS, {"losses": [], **vars(shown)}, step)

    def _shown(self) -> Shown | None:
        torch, optimizers = self._torch, self._agent.optimizers
        trained = trained_by(self._agent)
        if not trained or is_capturing(torch.cuda):
            return None
        moment_sum = check_sum(torch, list(moments(optimizers)))
        if is_whole(moment_sum) and any(map(is_shared_out, optimizers)):
            moment_sum = SHARD + moment_sum
        return Shown(check_sum(torch, list(enumerate(trained))), moment_sum, self._sketch(trained))

    def _sketch(self, whole: Sequence[Any]) -> list[float]:
        torch, parts = self._torch, [local(part).detach() for part in whole]
        real = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
        exact = torch.float32 if any(part.device.type == "mps" for part in real) else torch.float64
        with torch.no_grad():
            sums = stacked(torch, [part.sum(dtype=exact) for part in real]).tolist()
            norms = _norms(torch, real).tolist()
        return [math.hypot(*norms), *(math.fsum(_signed(sums, number)) for number in range(1, SUMS + 1))]


def _norms(torch: Any, tensors: Sequence[Any], dtype: Any = None) -> Any:
    """The norm of each tensor, in `dtype` (None: float32). In float64 if some tensor has that type, because torch
    refuses to narrow it."""
    plain = [tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach() for tensor in tensors]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in plain]
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in real) else dtype or torch.float32
    return stacked(torch, [torch.linalg.vector_norm(tensor, dtype=wide) for tensor in real])


def _signed(sums: list[float], number: int) -> list[float]:
    """The sums with the signs of Walsh function `number`. Any two of these functions differ in half of their signs."""
    return [-total if (place & number).bit_count() % 2 else total for place, total in enumerate(sums)]


def parameters(optimizers: Sequence[Any]) -> list[Any]:
    """The parameters that these optimizers train, each once, in order."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return list({id(each): each for group in groups for each in group}.values())


def trained_by(agent: Agent) -> list[Any]:
    """The parameters that torch's optimizers train, and those of the optimizers of plain classes beside them. In a job
    without an optimizer of torch's, those that its losses depend on."""
    own = parameters(agent.optimizers)
    return own + agent.trained_beside() if own else agent.reached()


def moments(optimizers: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """The tensors that these optimizers keep for each parameter, such as Adam's two averages, each with a number that
    identifies it."""
    for place, parameter in enumerate(parameters(optimizers)):
        # ZeroRedundancyOptimizer has None for parameters whose state another rank keeps.
        states = (state for optimizer in optimizers if (state := optimizer.state.get(parameter)) is not None)
        kept = {name: value for state in states for name, value in state.items() if getattr(value, "ndim", 0)}
        yield from ((_MOST_MOMENTS * place + number, kept[name]) for number, name in enumerate(sorted(kept)))


def is_shared_out(optimizer: Any) -> bool:
    """Whether each rank keeps the moments of different parameters, as with ZeroRedundancyOptimizer (ZeRO stage 1). Such
    an optimizer contains another optimizer, which trains only some of the parameters."""
    inner = getattr(optimizer, "optim", None)
    if not hasattr(inner, "param_groups"):
        return False
    own, all_ = ({id(each) for each in parameters([trainer])} for trainer in (inner, optimizer))
    return own < all_
