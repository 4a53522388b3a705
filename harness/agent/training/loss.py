"""The loss: the scalar from which a backward starts. This module never waits for the GPU, or for another accelerator
(torch.xpu, or one that a package adds to torch)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...protocol.wire import Kind
from ..agent import Agent
from .step_counter import Segment


class _Copy:
    """A scalar that is being copied from the GPU to pinned memory. `gpus`: torch's module for its kind of device."""

    def __init__(self, scalar: Any, gpus: Any) -> None:
        torch: Any = import_module("torch")

        self._host = torch.empty((), dtype=scalar.dtype, pin_memory=True)
        self._host.copy_(scalar, non_blocking=True)
        self._gpus, self._event = gpus, gpus.Event()
        # The copy runs on a stream of the scalar's own GPU, which need not be the current one.
        self._event.record(gpus.current_stream(scalar.device))

    def ready(self) -> bool:
        """Whether the copy is there. Not known while a graph is being captured: a query would break the capture."""
        return not is_capturing(self._gpus) and bool(self._event.query())

    def value(self) -> float:
        return float(self._host)


class Losses:
    """Records the losses of each step. If a loss is still on the GPU at the end of its step, a later event reports
    it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._tensor: Any = import_module("torch").Tensor
        self._late: list[tuple[int, Segment]] = []

    def backward(self, tensors: Any) -> None:
        """Adds an entry for a backward: the sum of its scalar roots, or None if some root can't be read now."""
        if self._late:
            self.poll()
        segment = self._agent.tally.now
        if type(tensors) is self._tensor and tensors.is_cpu and tensors.numel() == 1:  # as nearly always on a CPU
            self._agent.unseen.discard("loss")
            segment.losses.append(tensors.item())
            return
        if isinstance(tensors, (list, tuple)):
            scalars = [scalar for scalar in map(_local, tensors) if scalar is not None]
        else:
            scalars = [] if (scalar := _local(tensors)) is None else [scalar]
        if not scalars:
            segment.losses.append(None)
            return
        self._agent.saw("loss")
        on_host = all(scalar.is_cpu for scalar in scalars)
        segment.losses.append(sum(scalar.item() for scalar in scalars) if on_host else None)
        if len(scalars) == 1 and not on_host and (gpus := _gpus_of(scalars[0])) is not None:
            segment.pending.append((len(segment.losses) - 1, _Copy(scalars[0].detach(), gpus)))

    def step_over(self, step: int, segment: Segment) -> None:
        """Remembers a step whose losses are still being copied from the GPU."""
        self._late.append((step, segment))

    def poll(self) -> None:
        """Emits the losses that have arrived, in the order of their steps."""
        while self._late and arrived(self._late[0][1]):
            step, segment = self._late.pop(0)
            self._agent.emit(Kind.LOSS, {"losses": segment.losses}, step)


def arrived(segment: Segment) -> bool:
    """Whether all copies of a segment have arrived. If so, its losses are in place."""
    if not all(copy.ready() for _place, copy in segment.pending):
        return False
    for place, copy in segment.pending:
        segment.losses[place] = copy.value()
    return True


def _local(root: Any) -> Any:
    """The scalar tensor, on this rank, from which a backward starts. None for graph edges, vectors and meta tensors."""
    root = getattr(root, "_local_tensor", root)
    return root if hasattr(root, "numel") and root.numel() == 1 and not root.is_meta else None


def _gpus_of(scalar: Any) -> Any:
    """torch's module for the scalar's kind of device, such as torch.cuda. None if no copy can be awaited there, or if a
    graph is being captured: the copy would become part of it."""
    found = getattr(import_module("torch"), scalar.device.type, None)
    if not hasattr(found, "Event") or not hasattr(found, "current_stream"):
        return None
    return None if is_capturing(found) else found


def is_capturing(gpus: Any) -> bool:
    """Whether a CUDA graph, or its like, is being captured on the current stream. To read a value or to query an event
    then breaks the capture, and with it the job. `gpus`: torch's module for the kind of device."""
    capturing = getattr(gpus, "is_current_stream_capturing", None)
    started = getattr(gpus, "is_initialized", None)
    return capturing is not None and (started is None or started()) and bool(capturing())
