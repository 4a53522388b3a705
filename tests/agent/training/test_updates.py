"""Jobs whose optimizer is none of torch's: their steps are seen in the parameters."""

from __future__ import annotations

from typing import Any

import pytest

LOOP = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
folder = os.environ["FOLDER"]
torch.manual_seed(0)
data = TensorDataset(torch.arange(96).float().reshape(24, 4) / 100, torch.arange(24).float() / 24)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
params = list(model.parameters())
def clear():
    for p in params: p.grad = None
UPDATE
for x, y in DataLoader(data, batch_size=4):
    loss = (model(x).squeeze() - y).pow(2).mean()
    step(loss)
    print("LOSS", repr(loss.item()))
"""
LION = """
class Lion:
    def __init__(self, params): self.params, self.m = params, [torch.zeros_like(p) for p in params]
    @torch.no_grad()
    def step(self):
        for p, m in zip(self.params, self.m): p.add_(m.lerp_(p.grad, 0.1).sign(), alpha=-0.01)
lion = Lion(params)
"""
UPDATES = {
    "plain class": LION + "def step(loss): loss.backward(); lion.step(); clear()\n",
    "cleared before": """
def step(loss):
    model.zero_grad(); loss.backward()
    with torch.no_grad():
        for p in params: p.sub_(0.1 * p.grad)
""",
    "data": """
def step(loss):
    loss.backward()
    for p in params: p.data -= 0.1 * p.grad
    model.zero_grad()
""",
    "data replaced": """
def step(loss):
    loss.backward()
    for p in params: p.data = p.data - 0.1 * p.grad
    clear()
""",
    "numpy": """
def step(loss):
    loss.backward()
    for p in params: p.detach().numpy()[...] -= 0.1 * p.grad.numpy()
    clear()
""",
    "foreach": """
def step(loss):
    loss.backward()
    with torch.no_grad(): torch._foreach_add_(params, [p.grad for p in params], alpha=-0.1)
    clear()
""",
    "grad": """
def step(loss):
    with torch.no_grad():
        for p, g in zip(params, torch.autograd.grad(loss, params)): p.sub_(0.1 * g)
""",
    "grad and data": """
def step(loss):
    for p, g in zip(params, torch.autograd.grad(loss, params)): p.data.sub_(0.1 * g)
""",
    "clipped": """
def step(loss):
    loss.backward(); torch.nn.utils.clip_grad_norm_(params, 0.1)
    with torch.no_grad():
        for p in params: p -= 0.1 * p.grad
    clear()
""",
    "in the backward": """
def update(p):
    with torch.no_grad(): p.sub_(0.1 * p.grad)
    p.grad = None
for p in params: p.register_post_accumulate_grad_hook(update)
def step(loss): loss.backward()
""",
    "average beside": """
average = torch.optim.swa_utils.AveragedModel(model)
def step(loss):
    loss.backward()
    with torch.no_grad():
        for p in params: p.sub_(0.1 * p.grad)
    average.update_parameters(model); clear()
""",
}


def _losses(ran: Any) -> list[float]:
    return [float(line.split()[1]) for line in ran.output.splitlines() if line.startswith("LOSS")]


@pytest.mark.parametrize("how", UPDATES)
def test_each_update_is_a_step(rank: Any, how: str) -> None:
    """With its loss and its samples, however the job changes its parameters."""
    ran = rank.run(LOOP.replace("UPDATE", UPDATES[how]))
    assert ran.code == 0, ran.output
    assert [event.step for event in ran.of("step")] == [1, 2, 3, 4, 5, 6]
    assert [step["losses"] for step in ran.steps] == [[one] for one in _losses(ran)]
    assert [step["indices"] for step in ran.steps] == [[*range(at, at + 4)] for at in range(0, 24, 4)]
    assert ran.failures == []


@pytest.mark.parametrize("reshards", [True, False])
def test_a_plain_class_under_fsdp2(rank: Any, reshards: bool) -> None:
    """FSDP2 lends whole parameters to the forward; the optimizer changes its own parts of them."""
    wrap = f"""
import torch.distributed as dist
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    print("without"); raise SystemExit
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
for layer in model: fully_shard(layer, mesh=mesh, reshard_after_forward={reshards})
fully_shard(model, mesh=mesh)
params = list(model.parameters())
"""
    ran = rank.run(LOOP.replace("UPDATE", wrap + UPDATES["plain class"]))
    if "without" in ran.output:
        pytest.skip("this torch has no torch.distributed.fsdp.fully_shard")
    assert ran.code == 0, ran.output
    assert [event.step for event in ran.of("step")] == [1, 2, 3, 4, 5, 6]
    assert [step["losses"] for step in ran.steps] == [[one] for one in _losses(ran)]
    assert [step["indices"] for step in ran.steps] == [[*range(at, at + 4)] for at in range(0, 24, 4)]
    assert ran.failures == []


def test_backwards_without_an_update_belong_to_one_step(rank: Any) -> None:
    """Gradient accumulation."""
    update = """
made = 0
def step(loss):
    global made
    loss.backward(); made += 1
    if made % 3 == 0:
        with torch.no_grad():
            for p in params: p.sub_(0.1 * p.grad)
        clear()
"""
    ran = rank.run(LOOP.replace("UPDATE", update))
    assert [len(step["losses"]) for step in ran.steps] == [3, 3]


def test_a_save_comes_after_the_step_that_it_saves(rank: Any) -> None:
    """And the state is recorded by name, as of any optimizer; a load is no step."""
    update = (
        """
step = 0
torch.save(model.state_dict(), folder + "/first.pt")
"""
        + LION
        + """def step(loss):
    loss.backward(); clear()
    model.load_state_dict(torch.load(folder + "/first.pt"))
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(); lion.step(); clear()
    torch.save(model.state_dict(), folder + "/a.pt")
"""
    )
    hooks = ("steps", "loss", "samples", "state", "checkpoints", "kept")
    ran = rank.run(LOOP.replace("UPDATE", update), hooks=hooks)
    assert ran.code == 0, ran.output
    assert [event.step for event in ran.of("checkpoint.save_begin")] == [0, 1, 2, 3, 4, 5, 6]
    assert [event.step for event in ran.of("step")] == [1, 2, 3, 4, 5, 6]
    assert ran.failures == []
    kept = ran.of("checkpoint.parameters")
    assert [event.step for event in kept] == [1, 2, 3, 4, 5, 6]
    assert set(kept[0].data["parameters"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(kept[0].data["moments"]) == {f"{name}/m" for name in kept[0].data["parameters"]}
    assert all(step["norm"] for step in ran.steps)
    assert [event.step for event in ran.of("loss") if event.data["parameters"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("left_out", ["b", "a"])
def test_parameters_that_a_step_leaves_out_are_among_its_parameters(rank: Any, left_out: str) -> None:
    """Layers that are dropped at random, and experts without a token: the check sum after a step covers them, too, in
    the same order, so that it does not depend on what the first steps after a resume left out."""
    update = """
class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        self.made = 0
    def forward(self, x):
        self.made += 1
        return self.a(x) + self.b(x) if self.made > 1 or not LEFT_OUT else self.LAYER(x)
model = Dropped()
params = list(model.parameters())
def step(loss):
    loss.backward()
    with torch.no_grad():
        if model.made == 1:
            for p in params: p.fill_(0.5)  # the same in both runs, whatever the first step left out
        else:
            for p in params: p.sub_(0.1 * p.grad)
    clear()
"""
    update = update.replace("LAYER", "a" if left_out == "b" else "b")
    hooks = ("steps", "loss", "samples", "state")
    sums = []
    for attempt, leaves_out in enumerate(("True", "False")):
        ran = rank.run(LOOP.replace("UPDATE", update.replace("LEFT_OUT", leaves_out)), hooks=hooks, attempt=attempt)
        assert ran.code == 0, ran.output
        told = [event for event in ran.events if event.kind.value in ("loss", "step") and event.attempt == attempt]
        sums.append([event.data["parameters"] for event in told if event.data.get("parameters")])
    assert len(sums[0]) == 6
    assert sums[0] == sums[1]


def test_a_fault_lands_in_its_step(rank: Any) -> None:
    """A trigger of a step fires when that step begins, also if only the parameters show that the one before is over."""
    source = "class Stop:\n    def apply(self, site): raise SystemExit(7)\n"
    (rank.folder / "stop.py").write_text(source)
    trigger = rank.trigger(str(rank.folder / "stop.py"), "Stop", step=4)
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(LOOP.replace("UPDATE", UPDATES["plain class"]), triggers=(trigger,))
    assert (ran.code, len(ran.steps)) == (7, 3), ran.output


@pytest.mark.parametrize(("made", "why"), [
    ("", "it is none of torch's, and no parameter that a loss reached was seen to change between them"),
    ("idle = torch.optim.SGD(params, lr=0.1)", "no optimizer of torch's stepped, though the job made one"),
])  # fmt: skip
def test_what_cant_be_counted_is_said(rank: Any, made: str, why: str) -> None:
    """Backwards without any change of a parameter, and an optimizer of torch's that never steps."""
    update = """
MADE
def step(loss): loss.backward(); clear()
"""
    ran = rank.run(LOOP.replace("UPDATE", update.replace("MADE", made)))
    [note] = [event.data for event in ran.of("run.note") if event.data.get("unseen") == "steps"]
    assert ran.steps == []
    assert note["text"].startswith(f"the agent saw 6 backward passes and no optimizer step: {why}. Make ")


def test_a_rank_that_an_exception_ended_is_not_blamed_for_its_optimizer(rank: Any) -> None:
    """It died between a backward and its first step: nothing shows that its optimizer can't be seen."""
    update = """
opt = torch.optim.SGD(params, lr=0.1)
def step(loss):
    loss.backward()
    raise ValueError("of the job")
"""
    ran = rank.run(LOOP.replace("UPDATE", update))
    assert ran.code == 1
    assert [event for event in ran.of("run.note") if event.data.get("unseen") == "steps"] == []


def test_an_optimizer_of_torchs_decides_alone(rank: Any) -> None:
    """Beside one, an optimizer of a plain class makes no steps of its own; a warm-up before it was made is none."""
    update = """
model(torch.ones(1, 4)).sum().backward(); clear()
opt = torch.optim.SGD(params[:2], lr=0.1)
def step(loss):
    loss.backward()
    with torch.no_grad():
        for p in params[2:]: p.sub_(0.1 * p.grad)
    opt.step(); clear()
"""
    ran = rank.run(LOOP.replace("UPDATE", update))
    assert [event.step for event in ran.of("step")] == [1, 2, 3, 4, 5, 6]


def test_an_optimizer_that_hides_until_its_first_step(rank: Any) -> None:
    """A subclass that does not call torch's `__init__` is known only when it steps: from then on it decides alone."""
    update = """
class Hidden(torch.optim.SGD):
    def __init__(self, params):
        defaults = dict(torch.optim.SGD([torch.zeros(1)]).defaults, lr=0.1)
        torch.optim.Optimizer.__init__.__wrapped__(self, params, defaults)
hidden = Hidden(params)
import gc; gc.collect()
made = 0
def step(loss):
    global made
    loss.backward(); made += 1
    if made % 2 == 0: hidden.step(); clear()
"""
    ran = rank.run(LOOP.replace("UPDATE", update))
    assert ran.code == 0, ran.output
    assert [len(step["losses"]) for step in ran.steps] == [2, 2, 2]


RATES = """
for number, (x, y) in enumerate(DataLoader(data, batch_size=4)):
    BEFORE
    loss = (model(x).squeeze() - y).pow(2).mean()
    loss.backward(); optimizer.set(0.1 / (number + 1)) if AFTER else None; optimizer.step(); clear()
"""
PLAIN = {
    "attribute": """
    def __init__(self, params, lr): self.params, self.lr = list(params), lr
    def set(self, lr): self.lr = lr
""",
    "groups": """
    def __init__(self, params, lr):
        self.param_groups = [{"params": [p], "lr": lr, "momentum": 0.9} for p in params]
    params = property(lambda self: [p for group in self.param_groups for p in group["params"]])
    def set(self, lr):
        for group in self.param_groups: group["lr"] = lr
""",
    "tensor by name": """
    def __init__(self, params, lr): self.named, self.learning_rate = dict(enumerate(params)), torch.tensor(lr)
    params = property(lambda self: list(self.named.values()))
    def set(self, lr): self.learning_rate = torch.tensor(lr, dtype=torch.float64)
""",
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("keeps", PLAIN)
def test_the_learning_rate_of_a_plain_class(rank: Any, keeps: str, when: str) -> None:
    """It is that of the step, whether the loop sets it before the forward or after the backward, from the first step
    on; beside an optimizer of torch's, too."""
    update = f"""
class Own:
    {PLAIN[keeps].strip()}
    @torch.no_grad()
    def step(self):
        for p in self.params: p.sub_(0.01 * p.grad)
class Average:
    def __init__(self, params): self.params, self.decay = list(params), 0.9
    def step(self): pass
optimizer, average = Own(params, 0.1), Average(params)
"""
    beside = "optimizer = Own(params[:2], 0.1)\nadam = torch.optim.Adam(params[2:], lr=0.5)\n"
    loop = RATES.replace("AFTER", str(when == "after"))
    loop = loop.replace("BEFORE", "optimizer.set(0.1 / (number + 1))" if when == "before" else "pass")
    start = LOOP[: LOOP.index("for x, y")].replace("UPDATE", update)
    ran = rank.run(start + loop)
    groups = 4 if keeps == "groups" else 1
    assert [step["lr"] for step in ran.steps] == [[pytest.approx(0.1 / n)] * groups for n in range(1, 7)], ran.output
    assert ran.failures == []
    rank.run(start + beside + loop.replace("optimizer.step()", "optimizer.step(); adam.step()"), attempt=1)
    rates = [event.data["lr"] for event in rank.read() if event.attempt == 1 and event.kind.value == "step"]
    groups = 2 if keeps == "groups" else 1
    assert rates == [[pytest.approx(0.1 / n)] * groups + [0.5] for n in range(1, 7)]


def test_a_step_that_is_done_again_after_a_failed_backward(rank: Any) -> None:
    """The job goes back to a copy in memory. The backward that failed is forgotten: the update after the load is a
    step of its own, and not joined to the next one."""
    update = (
        LION
        + """
import copy
kept, made = copy.deepcopy(model.state_dict()), 0
def again(): raise RuntimeError("once")
def step(loss):
    global made
    made += 1
    handle = loss.register_hook(lambda _: again()) if made == 4 else None
    try:
        loss.backward()
    except RuntimeError:
        handle.remove(); clear(); model.load_state_dict(kept); return
    lion.step(); clear()
"""
    )
    ran = rank.run(LOOP.replace("UPDATE", update))
    assert ran.code == 0, ran.output
    assert [len(step["losses"]) for step in ran.steps] == [1] * 5, ran.steps
