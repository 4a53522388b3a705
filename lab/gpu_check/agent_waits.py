"""The agent never waits for the GPU, and still reports each loss: in plain steps, with GradScaler, on a GPU that is not
the current one, of a model that torch.compile compiled. And what it sees of a CUDA graph, whose replays call nothing in
Python."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from row import need_gpu

from torchaos.harness.protocol.wire import Event, Kind

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

STEPS = 20


def model(torch: Any, device: str) -> tuple[Any, Any]:
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(device)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def plain(torch: Any, device: str, steps: int) -> list[Any]:
    """The losses, as tensors. In these steps the job itself does not wait for the GPU, so nobody may."""
    net, optimizer = model(torch, device)
    data = torch.randn(32, 64, device=device)
    net(data).pow(2).mean().backward()  # allocates: the first step may wait
    optimizer.step()
    losses = []
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(data).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.set_sync_debug_mode("default")
    return losses


def scaled(torch: Any) -> None:
    """Five iterations, of which the second has an infinite gradient and is skipped."""
    net, optimizer = model(torch, "cuda")
    scaler, data = torch.amp.GradScaler("cuda"), torch.randn(32, 64, device="cuda")
    for number in range(5):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = net(data).float().pow(2).mean() * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def graphed(torch: Any) -> None:
    """One captured step, replayed STEPS times."""
    net, optimizer = model(torch, "cuda")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, capturable=True)
    data, side, graph = torch.randn(32, 64, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        net(data).pow(2).mean().backward()
        optimizer.step()

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    for _ in range(STEPS):
        graph.replay()


def compiled(torch: Any) -> None:
    """Five steps of a model that torch.compile compiled."""
    net, optimizer = model(torch, "cuda")
    fast, data = torch.compile(net), torch.randn(32, 64, device="cuda")
    for _ in range(5):
        optimizer.zero_grad()
        fast(data).pow(2).mean().backward()
        optimizer.step()


def main() -> int:
    need_gpu()
    from agent_step import arm

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        agent = arm(folder, ("steps", "loss", "lr"))
        import torch

        events = folder / "rank0.jsonl"
        losses = plain(torch, "cuda:0", STEPS)
        torch.cuda.synchronize()
        seen = _losses(events, torch)
        expected = [loss.item() for loss in losses]
        assert seen[-STEPS:] == expected, ("losses", seen[-STEPS:], expected)
        told = [f"{STEPS} losses arrived without a synchronisation"]
        before = _steps(events)
        scaled(torch)
        skipped = sum(bool(event.data.get("skipped")) for event in _of(events, Kind.STEP))
        told.append(f"GradScaler: {_steps(events) - before} of 5 steps seen, {skipped} skipped")
        if torch.cuda.device_count() > 1:
            other = plain(torch, "cuda:1", STEPS)
            torch.cuda.synchronize("cuda:1")
            assert _losses(events, torch)[-STEPS:] == [loss.item() for loss in other], "losses of another GPU"
            told.append("losses of a GPU that is not the current one are right")
        before = _steps(events)
        try:
            compiled(torch)
            told.append(f"torch.compile: {_steps(events) - before} of 5 steps seen")
        except Exception as error:  # it needs a compiler, which the machine may lack
            told.append(f"torch.compile does not work here: {type(error).__name__}")
        before = _steps(events)
        graphed(torch)
        told.append(f"CUDA graph: {_steps(events) - before} steps seen of 4 in Python and {STEPS} replays")
        assert not agent.broken, agent.broken
        print("; ".join(told))
    return 0


def _steps(events: Path) -> int:
    return len(_of(events, Kind.STEP))


def _of(events: Path, *kinds: Kind) -> list[Event]:
    with open(events, "rb") as file:
        return [event for event in map(Event.from_line, file) if event.kind in kinds]


def _losses(events: Path, torch: Any) -> list[float]:
    """The losses of all steps, in order. Those of the last steps are reported at the next backward, so it is done."""
    torch.zeros(1, device="cuda", requires_grad=True).sum().backward()
    found = {event.step: event.data["losses"] for event in _of(events, Kind.STEP, Kind.LOSS)}  # a later event wins
    return [loss for _step, losses in sorted(found.items()) for loss in losses if loss is not None]


if __name__ == "__main__":
    sys.exit(main())
