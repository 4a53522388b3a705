"""The work of the agent in a step of the training thread. Calls are counted, because times depend on the machine."""

from __future__ import annotations

from typing import Any

import pytest

# A call of a Python function costs about a microsecond in a step, because torch has emptied the processor's caches.
COUNTED = """
import collections, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(48, 256), torch.randn(48))
model = torch.nn.Linear(256, 1)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
sched = torch.optim.lr_scheduler.StepLR(opt, 1)
calls = collections.Counter()
def count(frame, event, argument):
    if event == "call" and os.sep + os.path.join("harness", "agent") + os.sep in frame.f_code.co_filename:
        calls[frame.f_code.co_name] += 1
for number, (x, y) in enumerate(DataLoader(data, batch_size=8)):
    if number == 4:
        sys.setprofile(count)
    loss = (model(x).squeeze() - y).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step(); sched.step()
sys.setprofile(None)
print(calls.total(), dict(calls))
"""


# A record with a newline among its bytes, which depends on the times in it, takes 1 call more.
@pytest.mark.parametrize(("hooks", "most"), [(("loss", "lr"), 33), (("loss", "lr", "samples"), 80)])
def test_calls_in_a_step(rank: Any, hooks: tuple[str, ...], most: int) -> None:
    """In a usual step the agent calls few functions of its own, and writes one line."""
    ran = rank.run(COUNTED, hooks=("steps", *hooks))
    assert ran.failures == []
    assert len(ran.steps) == 6
    assert int(ran.output.split()[0]) <= 2 * most, ran.output
    lines = [line for path in (rank.folder / "events").iterdir() for line in path.read_bytes().split(b"\n")]
    assert [line[:1] for line in lines].count(b"#") == 6
