"""What the agent costs a step of a GPT of 124 million parameters in bfloat16, with a small and a large batch (about 10
and 100 ms on an H100): blocks of steps with the hooks on and off take turns in one process, as in
lab/bench/agent_step.py. It passes if the usual hooks cost less than 1 %."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from row import SLOW, need_gpu, need_kernels, not_possible

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

LAYERS, WIDTH, HEADS, WORDS, LENGTH, BATCHES = 12, 768, 12, 50_257, 512, (8, 80)
PAIRS, BLOCK, MOST = 12, 12, 1.01
LIMIT_S = 50 * SLOW


def trainer(torch: Any, batch: int) -> Any:
    """Returns a function that does one step with a batch of so many texts."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    body = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    head, words = torch.nn.Linear(WIDTH, WORDS, bias=False), torch.nn.Embedding(WORDS, WIDTH)
    head.weight = words.weight
    net = torch.nn.Sequential(words, body, head).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    text = torch.randint(WORDS, (batch, LENGTH + 1), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            out = net(text[:, :-1])
        torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), text[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def main() -> int:
    need_gpu()
    need_kernels()
    hooks = ("steps", "loss", "lr", *sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        from agent_step import arm
        from intervals import median_interval

        agent = arm(Path(scratch), hooks)
        import torch

        torch.manual_seed(0)
        found = [compared(torch, agent, trainer(torch, batch), median_interval) for batch in BATCHES]
        assert not agent.broken, agent.broken
    print("; ".join(words for words, _right in found))
    return int(not all(right for _words, right in found))


def compared(torch: Any, agent: Any, step: Any, median_interval: Any) -> tuple[str, bool]:
    """What a step takes and how much longer with the hooks, in words; and whether that is little enough."""

    def block(on: bool) -> float:
        """The median time of a step in seconds. Each step ends with the GPU's work, since a job reads its loss."""
        agent.on = on
        times = []
        for _ in range(BLOCK):
            begun = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    begun, all_steps = time.perf_counter(), 2 * BLOCK * (PAIRS + 1)
    step()
    if (took_s := time.perf_counter() - begun) * all_steps / 10 > LIMIT_S:  # the first step takes longer
        not_possible(f"the first step takes {took_s:.1f} s here, so {all_steps} steps would take too long")
    block(True), block(False)
    ratios, plain = [], []
    for pair in range(PAIRS):
        first = bool(pair % 2)
        times = {first: block(first)}
        times[not first] = block(not first)
        ratios.append(times[True] / times[False])
        plain.append(times[False])
    ratio, low, high = median_interval(ratios)
    words = f"a step of {statistics.median(plain) * 1000:.1f} ms; on/off {ratio:.4f} [{low:.4f}, {high:.4f}]"
    return words, low <= MOST


if __name__ == "__main__":
    sys.exit(main())
