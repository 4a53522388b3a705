"""Jobs that put other values into their parameters, such as an average, for a save or an evaluation."""

from __future__ import annotations

from typing import Any

import pytest

JOB = """
import io, os, torch
from contextlib import contextmanager
from torch.utils.data import DataLoader
folder = os.environ["FOLDER"]
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
params = list(model.parameters())
average = [p.detach().clone() for p in params]
class Plain:
    def __init__(self): self.mode = "train"
    @torch.no_grad()
    def step(self):
        for p, a in zip(params, average): p.sub_(0.1 * p.grad); a.lerp_(p, 0.3)
    @torch.no_grad()
    def exchange(self, mode):
        if mode != self.mode: swap()
        self.mode = mode
    def eval(self): self.exchange("eval")
    def train(self): self.exchange("train")
@torch.no_grad()
def swap():
    for p, a in zip(params, average): kept = p.clone(); p.copy_(a); a.copy_(kept)
def swap_data():
    for p, a in zip(params, average): p.data, a.data = a.data, p.data
@contextmanager
def averaged():
    swap()
    try: yield
    finally: swap()
def save(name="a.pt"): torch.save({"model": model.state_dict()}, f"{folder}/{name}")
opt = OPTIMIZER
data = iter(DataLoader(torch.arange(96.).reshape(24, 4) / 100, batch_size=4))
for number in range(1, 7):
    loss = model(next(data)).square().sum()
    loss.backward(); opt.step()
    for p in params: p.grad = None
    if number % 2 == 0:
        BETWEEN
"""
SGD = "torch.optim.SGD(params, lr=0.1)"
BETWEEN = {
    "a save": "swap(); save(); swap()",
    "two saves": "swap(); save(); save('b.pt'); swap()",
    "a save to memory": "swap(); torch.save(model.state_dict(), io.BytesIO()); swap()",
    "a save, by .data": "swap_data(); save(); swap_data()",
    "a save, in a context": "\n        with averaged(): save()",
    "a save, by train and eval": "opt.eval(); save(); opt.train()",
    "a save, by load_state_dict": """
        own = {name: one.clone() for name, one in model.state_dict().items()}
        model.load_state_dict(dict(zip(own, average))); save(); model.load_state_dict(own)""",
    "an evaluation": """
        with averaged(), torch.no_grad(): [model(x) for x in DataLoader(torch.ones(4, 4))]""",
    "an evaluation and a save": """
        with averaged(), torch.no_grad(): [model(x) for x in DataLoader(torch.ones(4, 4))]; save()""",
}
HOOKS = ("steps", "samples", "state", "checkpoints", "kept")


def _states(ran: Any) -> dict[int, Any]:
    """The state after each step, also if a later event reports it."""
    assert ran.code == 0, ran.output
    assert ran.failures == []
    found = {}
    for event in ran.of("step", "loss"):
        if "parameters" in event.data:
            found[event.step] = [event.data[what] for what in ("parameters", "moments", "sketch")]
    return found


def _expected(rank: Any, optimizer: str) -> dict[int, Any]:
    ran = rank.run(JOB.replace("OPTIMIZER", optimizer).replace("BETWEEN", "pass"), hooks=HOOKS)
    for path in (rank.folder / "events").iterdir():
        path.unlink()
    assert ran.of("loss") == []
    return _states(ran)


@pytest.mark.parametrize("between", BETWEEN)
def test_the_state_after_a_step_is_what_the_job_trains_on_with(rank: Any, between: str) -> None:
    """And never what was in place for a save or an evaluation, in a job whose optimizer is of a plain class."""
    expected = _expected(rank, "Plain()")
    found = _states(rank.run(JOB.replace("OPTIMIZER", "Plain()").replace("BETWEEN", BETWEEN[between]), hooks=HOOKS))
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert found == expected


def test_an_optimizer_of_torch_is_seen_at_its_step(rank: Any) -> None:
    """Its step is a call, so the state is known before anything is put in its place."""
    expected = _expected(rank, SGD)
    text = JOB.replace("OPTIMIZER", SGD).replace("BETWEEN", BETWEEN["an evaluation and a save"])
    ran = rank.run(text, hooks=HOOKS)
    assert _states(ran) == expected
    assert ran.of("loss") == []


def test_a_save_to_memory_is_of_the_step_before_it(rank: Any) -> None:
    """The step is over when the save begins, although no call of a plain class has shown it."""
    write = """
        kept = io.BytesIO(); torch.save(model.state_dict(), kept)
        open(f"{folder}/{number}.pt", "wb").write(kept.getvalue())"""
    ran = rank.run(JOB.replace("OPTIMIZER", "Plain()").replace("BETWEEN", write), hooks=HOOKS)
    assert [event.step for event in ran.of("checkpoint.save_begin")] == [2, 4, 6], ran.output


def test_the_last_state_of_a_model_that_is_gone(rank: Any) -> None:
    """A job whose model lives in a function ends with a save: what was in memory at that save is the last state."""
    expected = _expected(rank, "Plain()")
    gone = "\ndel model, params, average, opt, loss, p"
    ran = rank.run(JOB.replace("OPTIMIZER", "Plain()").replace("BETWEEN", "save()") + gone, hooks=HOOKS)
    assert _states(ran) == expected


def test_the_last_state_of_a_rank_that_saves_nothing(rank: Any) -> None:
    """It is seen when the job leaves the process group, before its model is gone."""
    expected = _expected(rank, "Plain()")
    group = '"gloo", store=dist.HashStore(), rank=0, world_size=1'
    join = f"import torch.distributed as dist\ndist.init_process_group({group})"
    gone = "\ndist.destroy_process_group()\ndel model, params, average, opt, loss, p"
    text = join + JOB.replace("OPTIMIZER", "Plain()").replace("BETWEEN", "pass") + gone
    assert _states(rank.run(text, hooks=HOOKS)) == expected


def test_what_was_loaded_is_not_the_state_after_the_step_before(rank: Any) -> None:
    """It is that with which the load began."""
    between = """
        swap(); save(); swap()
        model.load_state_dict(torch.load(f"{folder}/a.pt")["model"])"""
    expected = _expected(rank, "Plain()")
    found = _states(rank.run(JOB.replace("OPTIMIZER", "Plain()").replace("BETWEEN", between), hooks=HOOKS))
    assert {step: found[step] for step in (1, 2)} == {step: expected[step] for step in (1, 2)}
