"""The loss of a step (`Losses`), and the event of each step (`StepEvents`).

The loss is the scalar from which a backward starts. It is never waited for on the GPU, or on another accelerator
(torch.xpu, or one that a package adds to torch).

With large batches, the digest and index of each sample are most of the journal. So the bytes that a rank writes about
samples are limited (`SampleBudget`). When it has written as many as its plan allows, it writes only the sums of a
step's samples, except in steps near a fault, a load or a save."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...protocol.check_sums import Sums, sums_of
from ...protocol.packed_lines import payload
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


NEAR, AFTER_SAVE = 64, 8  # steps: around a fault, and after a start or a load; after a save
_INDEX = 4  # bytes
_REST = 100  # bytes of a step's line without samples
_TEXT = (
    "the samples take more than the {} KiB that are kept for each rank: from step {} of attempt {} on, only one sum "
    "for each rank and step is kept, except near faults, loads and saves"
)


class StepEvents:
    """`with_state`: the segments have the state of training."""

    def __init__(self, agent: Agent, losses: Losses) -> None:
        self._agent, self._losses = agent, losses
        self._allowance = SampleBudget(agent)
        self.with_state = False

    def emit(self, with_last: bool) -> None:
        """Writes the event of the iteration that has ended. `with_last`: see `Tally.take`. Runs in every step."""
        agent = self._agent
        segment = agent.tally.take(with_last)
        agent.steps_over += 1
        agent.unseen.discard("steps")
        samples: bytes | None = None
        indices: tuple[int, ...] | None = None
        sums: Sums | None = None
        if segment.batches:
            samples = _joined([batch.samples for batch in segment.batches])
            indices = _joined([batch.indices for batch in segment.batches])
            if samples is not None:
                agent.unseen.discard("samples")
                sums = self._allowance.sums(samples, indices)
                if sums is not None:
                    samples = indices = None
        late = bool(segment.pending) and not arrived(segment)
        given = (
            segment.losses, segment.lr, segment.opt_step, segment.sched_step, segment.skipped, samples, indices,
            agent.phases.take(), sums,
        )  # fmt: skip
        dropped = {"dropped": segment.dropped} if segment.dropped else {}
        if not (self.with_state or dropped):
            agent.emit_step(agent.steps_over, *given)
        else:
            of_state = _of_state(segment) if self.with_state else {}
            agent.emit(Kind.STEP, {**payload(*given), **of_state, **dropped}, agent.steps_over)
        if late:
            self._losses.step_over(agent.steps_over, segment)


def _of_state(segment: Segment) -> dict[str, Any]:
    found: dict[str, Any] = {"norm": segment.norm}
    if segment.after is not None:
        found.update(vars(segment.after))
    if (before := segment.before) is not None:
        found.update(restored=before.parameters, restored_moments=before.moments, restored_sketch=before.sketch)
    return found


def _joined(parts: list[Any]) -> Any:
    """All parts (tuples, or bytes) joined in order. None if one of them is None."""
    if len(parts) == 1:
        return parts[0]
    return None if None in parts else functools.reduce(operator.add, parts)


class SampleBudget:
    """Counts the bytes that the rank may still write about samples."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._until = agent, NEAR
        self._handled = agent.loads, agent.saves
        self._said = False
        allowed = agent.plan.sample_bytes
        self._left: float = float("inf") if allowed is None else allowed - _spent(agent)

    def sums(self, samples: bytes, indices: Sequence[int] | None) -> Sums | None:
        """The sums to write instead of these samples; None if they are kept in full. Must be called once for each
        step."""
        self._left -= len(samples) + _INDEX * len(indices or ())
        if self._left >= 0 or self._is_near():
            return None
        agent = self._agent
        if not self._said and agent.who.rank == 0:
            allowed = (agent.plan.sample_bytes or 0) // 1024
            agent.emit(Kind.NOTE, {"text": _TEXT.format(allowed, agent.steps_over, agent.who.attempt)})
        self._said = True
        return sums_of(samples, indices)

    def _is_near(self) -> bool:
        agent, (loads, saves) = self._agent, self._handled
        step = agent.steps_over
        if agent.loads != loads:
            self._until = step + NEAR - 1
        elif agent.saves != saves:
            self._until = max(self._until, step + AFTER_SAVE - 1)
        self._handled = agent.loads, agent.saves
        if step <= self._until:
            return True
        moments = [fault.when.step for fault in agent.plan.faults if fault.when.step is not None]
        base = agent.faults.base
        return base is not None and any(abs(base + step - moment) <= NEAR for moment in moments)


def _spent(agent: Agent) -> int:
    """About how many bytes earlier attempts of this rank wrote about samples on this node. For small batches it is too
    low."""
    spent = 0
    if agent.who.attempt:
        for path in Path(agent.plan.events).glob(f"rank{agent.who.rank}-a*.jsonl"):
            text = path.read_bytes()
            spent += max(0, len(text) - _REST * text.count(b"\n"))
    return spent
