"""What the training state is, in a few bytes: a check sum of the parameters after each step, and the gradient's norm.

The check sum is the sum of each parameter's bits, taken as integers, so that any one flipped bit changes it; it is
made where the parameters are, and read back once a step. Parameters that are spread over ranks have one each, marked
as such.

A check sum tells that two runs differ, and not by how much. A *sketch* does: the norm of all parameters, and SUMS sums
over them, each with other signs, one per parameter. Where two runs differ, each sum differs by about the norm of the
difference (Johnson and Lindenstrauss).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from importlib import import_module
from typing import Any

from .agent import Agent
from .wire import Kind

SPIKE, MEMORY = 10.0, 20  # a norm over so many times the mean of so many steps before is told of at once
SUMS = 8  # of a sketch
SHARDED = "shard-"  # before a check sum of what is one rank's own part


class StateHook:
    def __init__(self, agent: Agent) -> None:
        careful = agent.careful("state")
        self._agent, self._torch = agent, import_module("torch")
        self._norms: deque[float] = deque(maxlen=MEMORY)
        self._fresh = True  # no backward is over yet: the parameters are what the process began with, or loaded
        self.backward_over, self.step_over = careful(self._note_norm), careful(self._note_parameters)

    def _note_norm(self) -> None:
        torch = self._torch
        grads = [local(one.grad) for one in parameters(self._agent.optimizers) if one.grad is not None]
        if self._fresh:
            now = self._agent.tally.now
            self._fresh, now.restored, now.restored_sketch = False, self._digest(), self._sketch()
        with torch.no_grad():
            if grads:  # at once, since the step may never be over
                norms = torch.stack([torch.linalg.vector_norm(grad.detach(), dtype=torch.float32) for grad in grads])
                norm = self._agent.tally.now.norm = float(torch.linalg.vector_norm(norms))
                self._tell_of_spike(norm)

    def _tell_of_spike(self, norm: float) -> None:
        usual = sum(self._norms) / len(self._norms) if len(self._norms) >= 3 else math.inf
        if math.isfinite(norm) and norm <= SPIKE * usual:
            self._norms.append(norm)
        else:
            self._agent.emit(Kind.NOTE, {"text": f"the norm of the gradient is {norm:.6g}", "norm": norm})

    def _note_parameters(self) -> None:
        digest = self._digest()
        if digest is not None:
            self._agent.saw("state")
            self._agent.tally.now.parameters, self._agent.tally.now.sketch = digest, self._sketch()

    def _digest(self) -> str | None:
        torch, found = self._torch, parameters(self._agent.optimizers)
        if not found:
            return None
        with torch.no_grad():
            sums = torch.stack([as_integers(torch, local(one)).sum(dtype=torch.int64) for one in found]).tolist()
        sharded = any(local(one) is not one for one in found)
        digest = blake2b(repr(sums).encode(), digest_size=6).hexdigest()
        return f"{SHARDED}{digest}" if sharded else digest

    def _sketch(self) -> list[float]:
        torch, found = self._torch, [local(one).detach() for one in parameters(self._agent.optimizers)]
        real = [torch.view_as_real(one) if one.is_complex() else one for one in found]
        exact = torch.float32 if any(one.device.type == "mps" for one in real) else torch.float64
        with torch.no_grad():
            sums = torch.stack([one.sum(dtype=exact) for one in real]).tolist()
            norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float32) for one in real]).tolist()
        return [math.hypot(*norms), *(math.fsum(_signed(sums, number)) for number in range(1, SUMS + 1))]


def _signed(sums: list[float], number: int) -> list[float]:
    """With the signs of a Walsh function: any two of these differ in half of the places."""
    return [-one if (place & number).bit_count() % 2 else one for place, one in enumerate(sums)]


def parameters(optimizers: Sequence[Any]) -> list[Any]:
    """What these optimizers train, each once, in order."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return list({id(one): one for group in groups for one in group}.values())


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; any other tensor is whole."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def as_integers(torch: Any, tensor: Any) -> Any:
    """The same memory, read as integers of the same size."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view(kinds[real.element_size()])
