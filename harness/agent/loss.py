"""The loss: the scalar that a backward starts from. A GPU is never waited for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .agent import Agent
from .tally import Segment
from .wire import Kind


class _Copy:
    """A scalar on its way from the GPU to pinned memory."""

    def __init__(self, scalar: Any) -> None:
        torch: Any = import_module("torch")

        self._host = torch.empty((), dtype=scalar.dtype, pin_memory=True)
        self._host.copy_(scalar, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def ready(self) -> bool:
        return bool(self._event.query())

    def value(self) -> float:
        return float(self._host)


class Losses:
    """Values that are not there when their step is over follow in an event of their own."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._late: list[tuple[int, Segment]] = []

    def backward(self, tensors: Any) -> None:
        """One entry for each backward: the sum of its scalar roots, or None where there is none that can be read."""
        if self._late:
            self.poll()
        segment = self._agent.tally.now
        if isinstance(tensors, (list, tuple)):
            scalars = [one for one in map(_local, tensors) if one is not None]
        else:
            scalars = [] if (one := _local(tensors)) is None else [one]
        if not scalars:
            segment.losses.append(None)
            return
        self._agent.saw("loss")
        on_host = all(one.is_cpu for one in scalars)
        segment.losses.append(sum(one.item() for one in scalars) if on_host else None)
        if len(scalars) == 1 and scalars[0].is_cuda and not _capturing():
            segment.pending.append((len(segment.losses) - 1, _Copy(scalars[0].detach())))

    def step_over(self, step: int, segment: Segment) -> None:
        """The values of this step are still on their way."""
        self._late.append((step, segment))

    def poll(self) -> None:
        """Send what has arrived, in order of steps."""
        while self._late and all(copy.ready() for _place, copy in self._late[0][1].pending):
            step, segment = self._late.pop(0)
            for place, copy in segment.pending:
                segment.losses[place] = copy.value()
            self._agent.emit(Kind.LOSS, {"losses": segment.losses}, step)


def _local(root: Any) -> Any:
    """The scalar tensor that a root is, on this rank; None for graph edges, vectors and what has no value."""
    root = getattr(root, "_local_tensor", root)
    return root if hasattr(root, "numel") and root.numel() == 1 and not root.is_meta else None


def _capturing() -> bool:
    """A copy into a CUDA graph that is being captured would become part of it."""
    torch: Any = import_module("torch")

    return bool(torch.cuda.is_current_stream_capturing())
