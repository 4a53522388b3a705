"""The loss of a step on a GPU, with a stand-in for the GPU: copied without waiting, and reported when it is there."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

Agent = Callable[[str], ModuleType]


class Scalar:
    """A scalar on a GPU."""

    is_cpu, is_meta, dtype = False, False, "float32"

    def __init__(self, value: float, gpu: int, device: str = "cuda") -> None:
        self.value, self.device = value, SimpleNamespace(type=device, index=gpu)

    def numel(self) -> int:
        return 1

    def detach(self) -> Scalar:
        return self


class Host:
    """Pinned memory: it has the value when the GPU has done the copy."""

    def __init__(self) -> None:
        self.value = float("nan")

    def copy_(self, scalar: Scalar, non_blocking: bool) -> None:
        assert non_blocking
        Gpu.waiting.append((scalar.device.index, lambda: setattr(self, "value", scalar.value)))

    def __float__(self) -> float:
        return self.value


class Event:
    """Is over when its stream has done all that came before it."""

    def record(self, stream: int | None = None) -> None:
        self.done = False
        Gpu.waiting.append((Gpu.current if stream is None else stream, lambda: setattr(self, "done", True)))

    def query(self) -> bool:
        return self.done


class Gpu:
    """Two GPUs with a stream each. `work(n)` lets GPU n do all that waits for it."""

    current = 0
    waiting: ClassVar[list[tuple[int, Callable[[], None]]]] = []

    @classmethod
    def work(cls, gpu: int) -> None:
        for stream, then in cls.waiting:
            if stream == gpu:
                then()
        cls.waiting[:] = [one for one in cls.waiting if one[0] != gpu]


TORCH = SimpleNamespace(
    Tensor=Scalar, empty=lambda shape, dtype, pin_memory: Host(),
    cuda=SimpleNamespace(
        Event=Event, current_stream=lambda device: device.index, is_current_stream_capturing=lambda: False
    ),
    xpu=SimpleNamespace(Event=Event, current_stream=lambda device: device.index), mps=SimpleNamespace(Event=Event),
)  # fmt: skip


@pytest.fixture
def losses(agent_module: Agent, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook of losses on two GPUs, with `emitted`: the events of its agent."""
    loss, tally = agent_module("agent.training.step_events"), agent_module("agent.training.step_counter")
    monkeypatch.setattr(loss, "import_module", lambda name: TORCH)
    Gpu.waiting.clear()
    emitted: list[Any] = []
    agent = SimpleNamespace(
        tally=tally.Tally(), saw=lambda hook: None, emit=lambda kind, data, step: emitted.append((step, data["losses"]))
    )
    hook = loss.Losses(agent)
    hook.emitted, hook.agent, hook.arrived = emitted, agent, loss.arrived
    return hook


def test_a_loss_is_reported_when_its_copy_is_there(losses: Any) -> None:
    """Before that the step has no loss, and afterwards the next backward reports it for its own step."""
    losses.backward(Scalar(2.5, gpu=0))
    segment = losses.agent.tally.now
    assert segment.losses == [None]
    assert not losses.arrived(segment)
    losses.step_over(1, segment)
    losses.poll()
    assert losses.emitted == []
    Gpu.work(0)
    losses.agent.tally.seal()
    losses.backward(Scalar(1.5, gpu=0))
    assert losses.emitted == [(1, [2.5])]


def test_a_loss_that_is_there_at_the_end_of_its_step_needs_no_event_of_its_own(losses: Any) -> None:
    """A job that reads its loss waits for the GPU, so the step itself can tell it. So the last step has a loss."""
    losses.backward(Scalar(2.5, gpu=0))
    Gpu.work(0)
    segment = losses.agent.tally.now
    assert losses.arrived(segment)
    assert segment.losses == [2.5]


def test_a_loss_of_a_gpu_that_is_not_the_current_one_is_awaited_there(losses: Any) -> None:
    """A job may use cuda:1 and leave cuda:0 the current GPU. What cuda:0 has done says nothing about the copy."""
    losses.backward(Scalar(2.5, gpu=1))
    Gpu.work(0)
    segment = losses.agent.tally.now
    assert not losses.arrived(segment), f"reported before it was copied: {segment.losses}"
    Gpu.work(1)
    assert losses.arrived(segment)
    assert segment.losses == [2.5]


def test_a_loss_of_another_accelerator_is_copied_too(losses: Any) -> None:
    """Intel's GPUs, and devices that a package adds to torch, have events and streams like CUDA's."""
    losses.backward(Scalar(2.5, gpu=1, device="xpu"))
    segment = losses.agent.tally.now
    assert len(segment.pending) == 1
    Gpu.work(1)
    assert losses.arrived(segment)
    assert segment.losses == [2.5]


def test_a_device_without_streams_has_no_loss(losses: Any) -> None:
    """To read it would be to wait. The step says that it had a loss, and not which."""
    losses.backward(Scalar(2.5, gpu=0, device="mps"))
    losses.backward(Scalar(2.5, gpu=0, device="unheard_of"))
    segment = losses.agent.tally.now
    assert (segment.losses, segment.pending) == ([None, None], [])


def test_while_a_cuda_graph_is_captured_no_event_is_queried(losses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of a step before the capture may still be on its way. To query its event would break the capture, and with
    it the job; the loss is reported by a backward after it."""
    losses.backward(Scalar(2.5, gpu=0))
    segment = losses.agent.tally.now
    losses.step_over(1, segment)
    Gpu.work(0)
    losses.agent.tally.seal()

    def refuse(event: Event) -> bool:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with monkeypatch.context() as capture:
        capture.setattr(TORCH.cuda, "is_current_stream_capturing", lambda: True)
        capture.setattr(Event, "query", refuse)
        losses.backward(Scalar(1.0, gpu=0))
        assert not losses.arrived(segment)
    assert losses.emitted == []
    losses.backward(Scalar(1.5, gpu=0))
    assert losses.emitted == [(1, [2.5])]
