"""The agent in real jobs of one process: one test for each trap that a trainer sets for it."""

from __future__ import annotations

import math
import textwrap
from typing import Any, Callable

import pytest
import torch

LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.arange(64).float().reshape(16, 4), torch.arange(16).float())
model = torch.nn.Linear(4, 1)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
"""


def losses(ran: Any) -> list[list[float]]:
    return [step["losses"] for step in ran.steps]


def test_plain_loop(rank: Any) -> None:
    """A loop over a loader is seen in full: steps, losses, samples with indices, rates, counters and phases; and the
    checkpoint after it, although torch is imported only in a function."""
    loop = """
sched = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
for x, y in DataLoader(data, batch_size=4):
    loss = (model(x).squeeze() - y).pow(2).mean()
    print("LOSS", repr(loss.item()))
    opt.zero_grad(); loss.backward(); opt.step(); sched.step()
torch.save({"step": 4}, "a.pt")
torch.load("a.pt")
print("TORCH", torch.__version__)
"""
    ran = rank.run(f"def main():\n{textwrap.indent(LOOP + loop, '    ')}\nmain()", cold=True)
    assert ran.code == 0, ran.output
    assert f"TORCH {ran.of('agent.started')[0].data['torch']}\n" in ran.output
    printed = [float(line.split()[1]) for line in ran.output.splitlines() if line.startswith("LOSS")]
    assert losses(ran) == [[one] for one in printed]
    assert [step["indices"] for step in ran.steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    digests = [digest for step in ran.steps for digest in step["samples"]]
    assert len(set(digests)) == 16
    assert [step["lr"] for step in ran.steps] == [[0.01], [0.005], [0.0025], [0.00125]]
    assert [step["opt_step"] for step in ran.steps] == [1, 2, 3, 4]
    assert [step["sched_step"] for step in ran.steps] == [0, 1, 2, 3]
    assert {"data", "forward", "backward", "optimizer"} == set(ran.steps[1]["phases"])
    assert [event.step for event in ran.of("step")] == [1, 2, 3, 4]
    kinds = [event.kind.value for event in ran.events if event.kind.value.startswith("checkpoint.")]
    assert [kind for kind in kinds if kind.endswith(("_begin", "_end"))] == [
        "checkpoint.save_begin", "checkpoint.save_end", "checkpoint.load_begin", "checkpoint.load_end",
    ]  # fmt: skip
    assert ran.of("agent.ended")[0].data["unseen"] == []
    assert ran.failures == []


@pytest.mark.parametrize("how", ["torch.distributed.init_process_group", "device_mesh"])
def test_joining_the_process_group_is_reported(rank: Any, how: str) -> None:
    """The event says how long the rank waited in init_process_group, however the job came to call it."""
    call = {"device_mesh": "torch.distributed.init_device_mesh('cpu', (1,))"}.get(how, f"{how}('gloo')")
    ran = rank.run(
        LOOP
        + f"""
import os, socket
free = socket.socket(); free.bind(("127.0.0.1", 0))
port = free.getsockname()[1]; free.close()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="1")
{call}
print("NAME", torch.distributed.init_process_group.__name__)
torch.distributed.destroy_process_group()
"""
    )
    assert ran.code == 0, ran.output
    (joined,) = ran.of("agent.group_joined")
    assert 0 < joined.data["blocked_s"] < joined.mono_s - ran.of("agent.started")[0].mono_s
    assert "NAME init_process_group" in ran.output
    assert ran.failures == []


def test_scheduler_of_a_wrapped_optimizer(rank: Any) -> None:
    """A scheduler that was made for a wrapper (Accelerate's) is that of the optimizer inside."""
    ran = rank.run(
        LOOP
        + """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer): self.optimizer = optimizer
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)
    def step(self): self.optimizer.step()
opt = Wrapper(opt)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1.0)
for x, y in DataLoader(data, batch_size=8):
    model(x).sum().backward(); opt.step(); sched.step()
"""
    )
    assert [step["sched_step"] for step in ran.steps] == [0, 1], ran.output


def test_gradient_accumulation(rank: Any) -> None:
    """Several backwards before one step are one iteration with all their losses and samples."""
    ran = rank.run(
        LOOP
        + """
for n, (x, y) in enumerate(DataLoader(data, batch_size=2), 1):
    model(x).sum().backward()
    if n % 4 == 0:
        opt.step(); opt.zero_grad()
"""
    )
    assert [len(one) for one in losses(ran)] == [4, 4]
    assert [step["indices"] for step in ran.steps] == [list(range(8)), list(range(8, 16))]


def test_a_step_that_only_makes_the_optimizers_state(rank: Any) -> None:
    """A step before any backward, with no gradient but zeros, trains nothing: a resume makes it so that the optimizer
    has buffers to fill. It is no iteration, and its learning rate is of none."""
    ran = rank.run(
        LOOP
        + """
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for p in model.parameters():
    p.grad = torch.zeros_like(p)
opt.param_groups[0]["lr"] = 0.0
opt.step()
opt.param_groups[0]["lr"] = 0.1
for x, y in DataLoader(data, batch_size=8):
    opt.zero_grad(); model(x).sum().backward(); opt.step()
"""
    )
    assert [step["lr"] for step in ran.steps] == [[0.1], [0.1]]


def test_parameters_are_looked_at_again_after_a_save(rank: Any) -> None:
    """A job may change its parameters before it saves them: the step after a save says with what it began."""
    ran = rank.run(
        LOOP
        + """
for n, (x, y) in enumerate(DataLoader(data, batch_size=4), 1):
    opt.zero_grad(); model(x).sum().backward(); opt.step()
    if n == 2:
        with torch.no_grad(): model.weight.clamp_(-0.1, 0.1)
        torch.save(model.state_dict(), "clipped.pt")
""",
        hooks=("steps", "state", "checkpoints"),
    )
    assert ["restored" in step for step in ran.steps] == [True, False, True, False]
    assert ran.steps[2]["restored"] != ran.steps[1]["parameters"]


def test_steps_without_a_backward(rank: Any) -> None:
    """A job that writes its gradients itself, without a backward, makes iterations all the same."""
    ran = rank.run(
        LOOP
        + """
for x, y in DataLoader(data, batch_size=4):
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
"""
    )
    assert len(ran.steps) == 4


@pytest.mark.parametrize("clears", ["opt", "model"])
def test_a_step_that_was_called_off(rank: Any, clears: str) -> None:
    """A backward whose gradients are thrown away is of no iteration, and neither is its batch (torchft, where another
    replica is gone; a step of several backwards is made again as a whole). The next step says how many there were."""
    ran = rank.run(
        LOOP
        + f"""
for n, (x, y) in enumerate(DataLoader(data, batch_size=2)):
    {clears}.zero_grad()
    for _ in range(2):
        loss = model(x).sum() + n
        loss.backward()
    if n not in (2, 3):
        opt.step()
        print("LOSS", repr(loss.item()))
"""
    )
    printed = [float(line.split()[1]) for line in ran.output.splitlines() if line.startswith("LOSS")]
    assert losses(ran) == [[one, one] for one in printed], ran.output
    assert [step["indices"] for step in ran.steps] == [[0, 1], [2, 3], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert [step["opt_step"] for step in ran.steps] == [1, 2, 3, 4, 5, 6]
    assert [step.get("dropped", 0) for step in ran.steps] == [0, 0, 2, 0, 0, 0]


def test_an_iteration_that_a_load_cuts_off(rank: Any) -> None:
    """A state is put back between the backwards of an iteration: neither its losses nor its batches are of the next."""
    ran = rank.run(
        LOOP
        + """
saved = opt.state_dict()
for n, (x, y) in enumerate(DataLoader(data, batch_size=2)):
    loss = model(x).sum() + n
    loss.backward()
    if n == 2:
        opt.load_state_dict(saved); model.zero_grad()
    elif n % 2 == (n < 2):
        opt.step(); opt.zero_grad()
"""
    )
    assert [step["indices"] for step in ran.steps][:2] == [[0, 1, 2, 3], [6, 7, 8, 9]], ran.output
    assert [len(one) for one in losses(ran)][:2] == [2, 2]


def test_a_step_that_is_made_again(rank: Any) -> None:
    """A step that was called off, and is made again on the batch in hand, was trained on that one, once."""
    ran = rank.run(
        LOOP
        + """
for n, (x, y) in enumerate(DataLoader(data, batch_size=4)):
    for attempt in range(2 if n == 1 else 1):
        opt.zero_grad()
        model(x).sum().backward()
    opt.step()
"""
    )
    assert [step["indices"] for step in ran.steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert [len(one) for one in losses(ran)] == [1, 1, 1, 1]


def test_batches_fetched_before_they_are_used(rank: Any) -> None:
    """A loop that fetches all batches of an iteration at once (HF Trainer) is paired with the backwards that follow."""
    ran = rank.run(
        LOOP
        + """
loader = iter(DataLoader(data, batch_size=2))
next(loader)  # drawn and thrown away, as in a resumed epoch
for _ in range(2):
    for x, y in [next(loader) for _ in range(3)]:
        model(x).sum().backward()
    opt.step()
"""
    )
    assert [step["indices"] for step in ran.steps] == [list(range(2, 8)), list(range(8, 14))]


def test_grad_scaler_skips(rank: Any) -> None:
    """A step that the scaler leaves out is an iteration all the same, and says so."""
    ran = rank.run(
        LOOP
        + """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=100)
for n in range(5):
    loss = model(torch.ones(2, 4)).sum() * (float("inf") if n in (1, 2) else 1.0)
    scaler.scale(loss).backward(); scaler.step(opt); scaler.update(); opt.zero_grad()
"""
    )
    assert [step["skipped"] for step in ran.steps] == [False, True, True, False, False], ran.output
    assert [step["opt_step"] for step in ran.steps] == [1, 1, 1, 2, 3]


def test_optimizers_that_step_unequally_have_one_counter(rank: Any) -> None:
    """A critic steps three times for each step of the generator. Each step is an iteration, and the counter is that of
    all optimizers together: it never goes back, and shows how often both have stepped."""
    ran = rank.run(
        LOOP
        + """
other = torch.nn.Linear(4, 1)
two = torch.optim.Adam(other.parameters())
opt = torch.optim.Adam(model.parameters())
for n in range(9):
    model(torch.ones(2, 4)).sum().backward(); opt.step(); opt.zero_grad()
    if n % 3 == 2:
        other(torch.ones(2, 4)).sum().backward(); two.step(); two.zero_grad()
"""
    )
    assert [step["opt_step"] for step in ran.steps] == list(range(1, 13)), ran.output


@pytest.mark.parametrize("restored", ["", "load", "assign"])
def test_a_counter_that_a_step_without_training_moved(rank: Any, restored: str) -> None:
    """DeepSpeed begins with a step with gradients of zero. It is no iteration, but the optimizer's own counter counts
    it: the agent says by how much the counter is ahead, unless the state was restored since then."""
    restore = {"load": "opt.load_state_dict(saved)", "assign": "opt.state[model.weight]['step'].fill_(7)", "": ""}
    ran = rank.run(
        LOOP
        + f"""
for weight in model.parameters(): weight.grad = torch.zeros_like(weight)
opt.step(); opt.zero_grad()
saved = opt.state_dict()
{restore[restored]}
for x, y in DataLoader(data, batch_size=4):
    model(x).sum().backward(); opt.step(); opt.zero_grad()
"""
    )
    first = 8 if restored == "assign" else 2
    assert [step["opt_step"] for step in ran.steps] == [first, first + 1, first + 2, first + 3], ran.output
    assert [event.data["steps"] for event in ran.of("optimizer.ahead")] == ([] if restored else [1])
    assert ran.failures == []


@pytest.mark.parametrize("begin", [0, 1])
def test_a_counter_that_does_not_begin_with_one(rank: Any, begin: int) -> None:
    """The agent says by how much an optimizer's own counter is ahead, if nothing was in its state before the first
    step. A step that a GradScaler skips moves no counter."""
    ran = rank.run(
        LOOP
        + f"""
class Counts(torch.optim.SGD):
    def step(self, closure=None):
        for weight in model.parameters():
            state = self.state[weight]
            state["step"] = state.get("step", {begin}) + 1
opt, scaler = Counts(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0)
for n in range(3):
    loss = model(torch.ones(2, 4)).sum() * (float("inf") if n == 0 else 1.0)
    scaler.scale(loss).backward(); scaler.step(opt); scaler.update(); opt.zero_grad()
"""
    )
    assert [step["opt_step"] for step in ran.steps] == [None, begin + 1, begin + 2], ran.output
    assert [event.data["steps"] for event in ran.of("optimizer.ahead")] == [1] * begin


def test_gan(rank: Any) -> None:
    """Two optimizers with a backward each make one iteration, with both losses and both rates."""
    ran = rank.run(
        LOOP
        + """
other = torch.nn.Linear(4, 1)
second = torch.optim.SGD(other.parameters(), lr=0.5)
for x, y in DataLoader(data, batch_size=4):
    other(x).sum().backward(); second.step(); second.zero_grad()
    model(x).sum().backward(); opt.step(); opt.zero_grad()
"""
    )
    assert [len(one) for one in losses(ran)] == [2, 2, 2, 2]
    assert [step["lr"] for step in ran.steps] == [[0.5, 0.01]] * 4
    assert [step["indices"] for step in ran.steps] == [list(range(n, n + 4)) for n in range(0, 16, 4)]


def test_gan_of_unequal_steps(rank: Any) -> None:
    """A process that resumes in the middle of a cycle tells the same steps as the first one did. One that begins afresh
    counts as the first did, too."""
    script = (
        LOOP
        + """
import os, sys
other = torch.nn.Linear(4, 1)
second = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
path = os.environ["FOLDER"] + "/saved.pt"
begin = int(os.environ.get("BEGIN", "0"))
if begin:
    second.load_state_dict(torch.load(path))
for n, (x, y) in enumerate(DataLoader(data, batch_size=2)):
    if n < begin:
        continue
    other(x).sum().backward(); second.step(); second.zero_grad()
    if n % 3 == 0:
        (10 * model(x)).sum().backward(); opt.step(); opt.zero_grad()
    if n == 2:
        torch.save(second.state_dict(), path)
    print("END", n)
"""
    )
    first = rank.run(script)
    told = [(step["lr"], step["indices"]) for step in first.steps]
    assert [len(lr) for lr, _ in told] == [2, *[1] * 9], first.output  # nobody knew at first what the cycle would be
    assert first.failures == []
    again = rank.run(script, attempt=1, env={"BEGIN": "3"})
    assert [(step["lr"], step["indices"]) for step in again.steps[10:]] == told[3:]
    afresh = rank.run(script, attempt=2)
    assert [(step["lr"], step["indices"]) for step in afresh.steps[17:]] == told


def test_an_outer_optimizer_in_the_first_step_after_a_resume(rank: Any) -> None:
    """An outer optimizer steps after each third step (DiLoCo). A process that resumes right before reports the same
    parameters after its first step as the process before it: those from before the outer step."""
    script = (
        LOOP
        + """
import os
outer = torch.optim.SGD([p.detach().clone().requires_grad_() for p in model.parameters()], lr=0.7)
path = os.environ["FOLDER"] + "/saved.pt"
begin = int(os.environ.get("BEGIN", "0"))
if begin:
    saved = torch.load(path)
    model.load_state_dict(saved["model"]); opt.load_state_dict(saved["opt"])
for n, (x, y) in enumerate(DataLoader(data, batch_size=2)):
    if n < begin:
        continue
    model(x).sum().backward(); opt.step(); opt.zero_grad()
    if n % 3 == 2:
        outer.step()
        with torch.no_grad():
            for one in model.parameters(): one.mul_(0.5)
    if n == 4 and not begin:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
"""
    )
    hooks = ("steps", "lr", "state")
    first = rank.run(script, hooks=hooks)
    after = {step["opt_step"]: (step["lr"], step["parameters"]) for step in first.steps}
    again = rank.run(script, hooks=hooks, attempt=1, env={"BEGIN": "5"})
    assert again.failures == []
    resumed = again.steps[len(first.steps)]
    assert (resumed["lr"], resumed["parameters"]) == after[resumed["opt_step"]], again.output


def test_parameters_of_several_optimizers(rank: Any, agent_module: Callable[[str], Any]) -> None:
    """Their check sum is made in the order in which the optimizers were made, so that equal ranks have equal sums."""
    ran = rank.run(
        """
import gc, torch
junk, parts, opts = [], [], []
for n in range(12):  # at addresses in no order
    junk += [bytearray(500 + 97 * (5 * n % 7)) for _ in range(9)]
    parts.append(torch.nn.Parameter(torch.full((2,), n + 1.0)))
    opts.append(torch.optim.SGD([parts[-1]], lr=0.5))
    del junk[:: 2 + n % 3]
opts[3] = None; gc.collect()  # one that is gone is no part of it
sum(one.sum() for one in parts).backward()
for one in opts:
    if one: one.step()
""",
        hooks=("steps", "state"),
    )
    left = [torch.full((2,), n + 0.5) for n in range(12) if n != 3]
    wanted = agent_module("protocol.check_sums").check_sum(torch, list(enumerate(left)))
    assert ran.steps[-1]["parameters"] == wanted, ran.output


def test_parameters_and_gradients_of_any_type(rank: Any) -> None:
    """Double precision, complex numbers and the sparse gradients of an embedding: parameters and norms are seen."""
    ran = rank.run(
        """
import torch
double = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
circle = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
words = torch.nn.Embedding(5, 2, sparse=True)
opts = [torch.optim.SGD([double, circle], lr=0.1), torch.optim.SparseAdam(words.parameters())]
for _ in range(2):
    (double.sum() + circle.abs().sum() + words(torch.tensor([1, 1])).sum()).backward()
    for one in opts:
        one.step()
        one.zero_grad()
""",
        hooks=("steps", "state"),
    )
    assert not ran.failures, ran.failures
    step = ran.steps[-1]
    assert step["parameters"], ran.output
    assert step["norm"] == pytest.approx((3 * 1 + 2 * 1 + 2 * 2**2) ** 0.5)


def test_a_norm_that_overflows_in_float32(rank: Any) -> None:
    """Finite gradients have a finite norm, also under a large loss scale. A gradient that is infinite has none."""
    ran = rank.run(
        """
import torch
weights = torch.nn.Parameter(torch.ones(4))
opt = torch.optim.SGD([weights], lr=0.1)
for scale in (1e30, float("inf")):
    (weights.sum() * scale).backward()
    opt.step()
    opt.zero_grad()
""",
        hooks=("steps", "state"),
    )
    assert not ran.failures, ran.failures
    assert [step["norm"] for step in ran.steps] == [pytest.approx(2e30), math.inf]


def test_a_step_that_a_cuda_graph_captures_is_not_read(rank: Any) -> None:
    """To read a value on the host breaks the capture, and with it the job. The step has no norm and no parameters; the
    steps around it have."""
    ran = rank.run(
        """
import torch
weights = torch.nn.Parameter(torch.ones(4))
opt = torch.optim.SGD([weights], lr=0.1)
plain, capturing = torch.Tensor.tolist, False
def read(tensor, *given):
    if capturing:
        raise RuntimeError("operation not permitted when stream is capturing")
    return plain(tensor, *given)
torch.Tensor.tolist = read
torch.Tensor.__float__ = lambda tensor: float(read(tensor))
torch.cuda.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: capturing
for capturing in (False, True, False):
    weights.sum().backward()
    opt.step()
    opt.zero_grad()
""",
        hooks=("steps", "state"),
    )
    assert not ran.failures, ran.failures
    assert [(step["norm"], "parameters" in step) for step in ran.steps] == [(2.0, True), (None, False), (2.0, True)]


def test_what_a_load_in_mid_attempt_put_back(rank: Any) -> None:
    """The first step of a process, and the first after a save or a load, say what the parameters and moments were
    before it: a trainer may warm up before it loads, and what a load put back is compared with what the job went on
    with after the save."""
    ran = rank.run(
        LOOP
        + """
def step():
    opt.zero_grad(); model(torch.ones(2, 4)).sum().backward(); opt.step()
step()
torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "kept.pt")
step()
kept = torch.load("kept.pt", weights_only=True)
model.load_state_dict(kept["model"]); opt.load_state_dict(kept["opt"])
step(); step()
""",
        hooks=("steps", "state", "checkpoints"),
    )
    first, saved, after, _ = ran.steps
    assert [("restored" in step) for step in ran.steps] == [True, True, True, False], ran.output
    assert (after["restored"], after["restored_moments"]) == (first["parameters"], first["moments"])
    assert (after["restored"], after["restored_moments"]) == (saved["restored"], saved["restored_moments"])


def test_optimizer_in_backward(rank: Any) -> None:
    """Optimizers that step inside the backward, one per parameter, make one iteration per backward."""
    ran = rank.run(
        LOOP
        + """
own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
for p in own:
    p.register_post_accumulate_grad_hook(lambda p: (own[p].step(), own[p].zero_grad()) and None)
del opt
for x, y in DataLoader(data, batch_size=4):
    model(x).sum().backward()
"""
    )
    assert len(ran.steps) == 4, ran.output
    assert all(len(one) == 1 for one in losses(ran))


def test_lbfgs(rank: Any) -> None:
    """LBFGS evaluates its closure many times inside one step: one iteration."""
    ran = rank.run(
        LOOP
        + """
opt = torch.optim.LBFGS(model.parameters(), max_iter=4)
for x, y in DataLoader(data, batch_size=8):
    def closure():
        opt.zero_grad()
        loss = (model(x).squeeze() - y).pow(2).mean()
        loss.backward()
        return loss
    opt.step(closure)
"""
    )
    assert len(ran.steps) == 2
    assert all(len(one) > 1 for one in losses(ran))
    assert [step["indices"] for step in ran.steps] == [list(range(8)), list(range(8, 16))]


def test_compile(rank: Any) -> None:
    """A compiled model (without graph breaks) and a compiled optimizer step are seen, and compile as without us."""
    ran = rank.run(
        LOOP
        + """
net = torch.compile(model, backend="eager", fullgraph=True)
step = torch.compile(opt.step, backend="eager")
for x, y in DataLoader(data, batch_size=4):
    net(x).sum().backward(); step(); opt.zero_grad()
"""
    )
    assert ran.code == 0, ran.output
    assert [step["opt_step"] for step in ran.steps] == [1, 2, 3, 4], ran.output
    assert len(ran.steps) == 4
    assert ran.failures == []


@pytest.mark.slow
def test_compiled_function_with_a_step(rank: Any) -> None:
    """A step inside a compiled function of the user's is seen."""
    ran = rank.run(
        LOOP
        + """
@torch.compile(backend="eager")
def update():
    opt.step()
for x, y in DataLoader(data, batch_size=4):
    model(x).sum().backward(); update(); opt.zero_grad()
"""
    )
    assert ran.code == 0, ran.output
    assert len(ran.steps) == 4, ran.output
    assert ran.failures == []


WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 64
    def __getitem__(self, n): return torch.full((3,), float(n))

if __name__ == "__main__":
    model = torch.nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=%r, persistent_workers=True)
    for epoch in range(2):
        for n, x in enumerate(loader):
            if n == 3: break
            model(x).sum().backward(); opt.step(); opt.zero_grad()
"""


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_run_ahead(rank: Any, context: str) -> None:
    """Samples are what was consumed, not what workers had drawn; the workers themselves get no agent."""
    ran = rank.run(WORKERS % context)
    assert ran.code == 0, ran.output
    once = [list(range(n, n + 4)) for n in range(0, 12, 4)]
    assert [step["indices"] for step in ran.steps] == once + once
    assert ran.steps[0]["samples"] == ran.steps[3]["samples"]
    assert len(ran.of("agent.started")) == 1


def test_iterable_dataset(rank: Any) -> None:
    """An IterableDataset has no indices; its samples have digests all the same."""
    ran = rank.run(
        LOOP
        + """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(torch.arange(32).float().reshape(8, 4))
for x in DataLoader(Stream(), batch_size=4):
    model(x).sum().backward(); opt.step()
"""
    )
    assert [step["indices"] for step in ran.steps] == [None, None]
    assert [len(step["samples"]) for step in ran.steps] == [4, 4]


def test_evaluation_does_not_count(rank: Any) -> None:
    """Batches that evaluation draws between two steps are not samples trained on."""
    ran = rank.run(
        LOOP
        + """
for x, y in DataLoader(data, batch_size=8):
    model(x).sum().backward(); opt.step()
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=3): model(x)
"""
    )
    assert [step["indices"] for step in ran.steps] == [list(range(8)), list(range(8, 16))]


def test_digests_follow_the_sample(rank: Any) -> None:
    """A sample has the same digest in whatever batch it comes, and another one when a single byte differs."""
    ran = rank.run(
        LOOP
        + """
changed = data.tensors[0].clone(); changed[3, 2] += 1
for batch, x in ((4, data.tensors[0]), (2, data.tensors[0]), (16, changed)):
    for x, y in DataLoader(TensorDataset(x, data.tensors[1]), batch_size=batch):
        model(x).sum().backward(); opt.step()
"""
    )
    digests = [digest for step in ran.steps for digest in step["samples"]]
    assert digests[:16] == digests[16:32]
    assert [a == b for a, b in zip(digests[:16], digests[32:], strict=True)] == [n != 3 for n in range(16)]


DDP = (
    LOOP
    + """
import os, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.environ["FOLDER"] + "/store", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(model)
"""
)


def test_ddp_drops_what_was_not_trained_on(rank: Any) -> None:
    """Under DDP the inputs of the model decide: batches that were drawn and discarded, or evaluated, don't count."""
    ran = rank.run(
        DDP
        + """
loader = iter(DataLoader(data, batch_size=2))
next(loader); ahead = next(loader)
for _ in range(3):
    (x, y), ahead = ahead, next(loader)  # one batch is always on its way
    model(x[:, :]).sum().backward(); opt.step()
    model.eval(); model(y.new_ones(2, 4)); model.train()
"""
    )
    assert ran.code == 0, ran.output
    assert [step["indices"] for step in ran.steps] == [[2, 3], [4, 5], [6, 7]], ran.failures
    assert ran.failures == []


FETCHES_AHEAD = (
    DDP
    + """
import threading
fetched, full = %s, threading.Event()
take = fetched.get  # as a loop has it that waits already
def fetch():
    for n, batch in enumerate(DataLoader(data, batch_size=2)):
        fetched.put(batch)
        full.set() if n == 5 else None
threading.Thread(target=fetch, daemon=True).start()
full.wait()
for _ in range(6):
    x, y = take()
    model(x / 2).sum().backward(); opt.step()
"""
)


def test_batches_that_a_thread_fetches(rank: Any) -> None:
    """What a thread has fetched, the loop has not: a batch counts when it was taken from the queue, also where the loop
    makes something else of it before the model is given it."""
    ran = rank.run(FETCHES_AHEAD % "__import__('queue').Queue()")
    assert [step["indices"] for step in ran.steps] == [[n, n + 1] for n in range(0, 12, 2)], ran.output
    assert ran.failures == []


def test_batches_that_nobody_sees_leave_a_thread(rank: Any) -> None:
    """Where that can't be seen, nothing is said of what was trained on: it would be whatever was fetched last."""
    ran = rank.run(FETCHES_AHEAD % "__import__('queue').SimpleQueue()")
    assert [step["samples"] for step in ran.steps] == [None] * 6, ran.output
    notes = [event.data["text"] for event in ran.of("run.note")]
    assert len(notes) == 1
    assert "thread" in notes[0]


def test_a_mask_says_nothing(rank: Any) -> None:
    """Batches that were drawn and left out are not taken for those trained on, because all have the same mask."""
    ran = rank.run(
        DDP
        + """
class Masked(torch.nn.Module):
    def __init__(self): super().__init__(); self.inner = torch.nn.Linear(4, 1)
    def forward(self, x, mask): return self.inner(x)
model = torch.nn.parallel.DistributedDataParallel(Masked())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def with_mask(samples): return {"mask": torch.ones(5, 5), "x": torch.stack([x for x, y in samples])}
for n, batch in enumerate(DataLoader(data, batch_size=4, collate_fn=with_mask)):
    if n < 2:
        continue  # to where it left off
    model(batch["x"] / 2, batch["mask"]).sum().backward(); opt.step()
"""
    )
    assert [step["indices"] for step in ran.steps] == [[8, 9, 10, 11], [12, 13, 14, 15]], ran.output


def test_a_wrapper_that_is_never_called(rank: Any) -> None:
    """A job wraps its model and trains the model inside, as local SGD does: from the second step on, a batch from the
    loader begins the forward phase, as without a wrapper."""
    ran = rank.run(
        DDP
        + """
for x, y in DataLoader(data, batch_size=4):
    model.module(x).sum().backward(); opt.step()
"""
    )
    assert ["forward" in step["phases"] for step in ran.steps] == [False, True, True, True]


def test_ddp_without_a_loader(rank: Any) -> None:
    """Without any loader the inputs of the wrapped model are the samples."""
    ran = rank.run(
        DDP
        + """
model.training = False  # as Lightning leaves it; the module inside is in training
for n in range(3):
    model(torch.full((2, 4), float(n))).sum().backward(); opt.step()
"""
    )
    assert [step["indices"] for step in ran.steps] == [None] * 3
    assert all("forward" in step["phases"] for step in ran.steps)
    assert len({tuple(step["samples"]) for step in ran.steps}) == 3


def test_accelerate_fetches_one_ahead(rank: Any) -> None:
    """Without a wrapped model, Accelerate's habit of fetching the next batch first is known by its module's name."""
    (rank.folder / "accelerate").mkdir()
    (rank.folder / "accelerate" / "__init__.py").write_text("")
    (rank.folder / "accelerate" / "data_loader.py").write_text(
        "def ahead(loader):\n"
        "    batches = iter(loader)\n"
        "    now = next(batches)\n"
        "    while now is not None:\n"
        "        later = next(batches, None)\n"
        "        yield now\n"
        "        now = later\n"
    )
    ran = rank.run(
        LOOP
        + """
from accelerate.data_loader import ahead
for x, y in ahead(DataLoader(data, batch_size=4)):
    model(x).sum().backward(); opt.step()
"""
    )
    assert [step["indices"] for step in ran.steps] == [list(range(n, n + 4)) for n in range(0, 16, 4)], ran.output


def test_collectives_are_a_phase(rank: Any) -> None:
    """Collectives, DDP's own included, are seen when they are asked for."""
    ran = rank.run(
        DDP
        + """
for x, y in DataLoader(data, batch_size=4):
    model(x).sum().backward(); opt.step(); dist.all_reduce(torch.ones(2))
import atexit
atexit._run_exitfuncs(); os._exit(0)  # torch 2.15 may abort on its own way out
""",
        hooks=("steps", "collectives"),
    )
    assert ran.code == 0, ran.output
    assert ran.failures == []
    assert all("collective" in step["phases"] for step in ran.steps[1:])
    assert ran.of("agent.ended")[0].data["unseen"] == []


def test_no_loss_where_backward_is_not_called(rank: Any) -> None:
    """Where a trainer calls the autograd engine itself, steps are counted by the optimizer and losses are unseen."""
    ran = rank.run(
        LOOP
        + """
from torch.autograd import Variable
for x, y in DataLoader(data, batch_size=4):
    root = model(x).sum()
    Variable._execution_engine.run_backward((root,), (torch.ones_like(root),), False, False, (), True, True)
    opt.step(); opt.zero_grad()
"""
    )
    assert losses(ran) == [[], [], [], []], ran.output
    assert "loss" in ran.of("agent.ended")[0].data["unseen"]


def test_reentrant_checkpointing(rank: Any) -> None:
    """A backward inside a backward is no loss of its own."""
    ran = rank.run(
        LOOP
        + """
from torch.utils.checkpoint import checkpoint
for x, y in DataLoader(data, batch_size=4):
    checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward(); opt.step()
"""
    )
    assert [len(one) for one in losses(ran)] == [1, 1, 1, 1]


def test_users_own_sitecustomize(rank: Any) -> None:
    """A sitecustomize of the user's, later on the path, runs as it would without us."""
    theirs = rank.folder / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import builtins\nbuiltins.THEIRS = __file__\n")
    env = {"PYTHONPATH": rank.environment((), (), 0)["PYTHONPATH"] + ":" + str(theirs)}
    ran = rank.run("import sitecustomize\nprint(THEIRS, sitecustomize.__file__)", env=env, cold=True)
    assert ran.output.split() == [str(theirs / "sitecustomize.py")] * 2
    assert len(ran.of("agent.started")) == 1


@pytest.mark.slow
def test_users_sitecustomize_that_imports_torch_and_breaks(rank: Any) -> None:
    """A user's sitecustomize that imports torch and then fails changes nothing for the agent."""
    theirs = rank.folder / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import torch\n1 / 0\n")
    env = {"PYTHONPATH": rank.environment((), (), 0)["PYTHONPATH"] + ":" + str(theirs)}
    ran = rank.run(LOOP + "model(data.tensors[0]).sum().backward(); opt.step(); print('done')", env=env, cold=True)
    assert "ZeroDivisionError" in ran.output
    assert "done" in ran.output
    assert len(ran.steps) == 1


def test_python_m(rank: Any) -> None:
    """A job started with `python -m` is seen."""
    (rank.folder / "trainer.py").write_text(LOOP + "model(data.tensors[0]).sum().backward(); opt.step()")
    ran = rank.run("import runpy; runpy.run_module('trainer', run_name='__main__')")
    assert len(ran.steps) == 1, ran.output


def test_isolated_python(rank: Any) -> None:
    """`python -I` keeps the environment out: no agent, which tells of a job without torch, too, and the job runs."""
    ran = rank.run("print('done')", options=("-I",))
    assert ran.output.strip() == "done"
    assert ran.events == []


def test_torch_never(rank: Any) -> None:
    """A rank that does not import torch says so."""
    never = rank.run("print('no torch')", cold=True)
    ended = never.of("agent.ended")[-1]
    assert never.of("agent.started")[-1].data["torch"] is None
    assert "steps" in ended.data["unseen"]


def test_inference_only(rank: Any) -> None:
    """A job that never trains has no steps, and its traced model still runs."""
    ran = rank.run(
        LOOP
        + """
traced = torch.jit.trace(model, torch.ones(1, 4))
with torch.inference_mode():
    for x, y in DataLoader(data, batch_size=4): traced(x)
print("done")
"""
    )
    assert ran.output.split()[-1] == "done"
    assert ran.steps == []
    assert "steps" in ran.of("agent.ended")[0].data["unseen"]


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHAOS_PLAN"])
def test_arms_only_in_a_rank(rank: Any, missing: str) -> None:
    """RANK alone makes no rank: without any one of torchelastic's variables or the plan nothing is written."""
    ran = rank.run(LOOP + "opt.step(); print('done')", env={missing: None})
    assert (ran.code, ran.output.strip(), ran.events) == (0, "done", [])


def test_children_get_no_agent(rank: Any) -> None:
    """A forked child, and a Python that the rank starts, write nothing, though they inherit its environment."""
    ran = rank.run(
        LOOP
        + """
import os, subprocess, sys
if os.fork() == 0:
    model(data.tensors[0]).sum().backward(); opt.step()
    sys.exit(0)
os.wait()
subprocess.run([sys.executable, "-c", ""], check=True)
model(data.tensors[0]).sum().backward(); opt.step()
"""
    )
    assert len(ran.steps) == 1
    assert len(ran.of("agent.started")) == 1
    assert len(ran.of("agent.ended")) == 1


def test_rank_that_calls_exec(rank: Any) -> None:
    """A rank that replaces itself is the same rank: it gets an agent again, with a file of its own."""
    ran = rank.run(
        """
import os, sys
if len(sys.argv) == 1:
    import torch
    os.execv(sys.executable, [sys.executable, __file__, "again"])
"""
        + LOOP
        + "model(data.tensors[0]).sum().backward(); opt.step()"
    )
    assert len(ran.steps) == 1
    assert len({event.source for event in ran.of("agent.started")}) == 2


def test_exit_without_atexit(rank: Any) -> None:
    """Events survive os._exit; only the last one is missing."""
    ran = rank.run(LOOP + "import os\nmodel(data.tensors[0]).sum().backward(); opt.step(); os._exit(3)")
    assert ran.code == 3
    assert len(ran.steps) == 1
    assert ran.of("agent.ended") == []


def test_error_in_a_hook(rank: Any) -> None:
    """An error in one hook takes that hook out, says so once, and changes nothing else."""
    ran = rank.run(
        LOOP
        + """
class Odd:
    def __float__(self): raise TypeError("no number")
for x, y in DataLoader(data, batch_size=4):
    model(x).sum().backward()
    opt.param_groups.append({**opt.param_groups[0], "params": [], "lr": Odd()})
    opt.step(); opt.param_groups.pop()
print("done")
"""
    )
    assert ran.output.strip() == "done"
    assert [failed["hook"] for failed in ran.failures] == ["lr"]
    assert [len(step["samples"]) for step in ran.steps] == [4, 4, 4, 4]
    assert [step["lr"] for step in ran.steps] == [[]] * 4


def test_agent_that_cannot_start(rank: Any) -> None:
    """Where nothing can be written the job runs without an agent, and stderr says why."""
    (rank.folder / "events").rmdir()
    ran = rank.run(LOOP + "opt.step(); print('done')")
    assert ran.code == 0, ran.output
    assert "done" in ran.output
    assert "the agent did not start" in ran.output


def test_users_exception_passes(rank: Any) -> None:
    """What the user's own code raises in a backward reaches the user, and the next iteration counts as ever."""
    ran = rank.run(
        LOOP
        + """
def bad(grad): raise ValueError("mine")
for n in range(3):
    loss = model(torch.ones(2, 4)).sum()
    if n == 1: loss.register_hook(bad)
    try: loss.backward()
    except ValueError as error: print(error); continue
    opt.step()
"""
    )
    assert "mine" in ran.output
    assert len(ran.steps) == 2


def test_torchaos_is_not_needed(rank: Any) -> None:
    """The agent works where no torchaos can be imported: nothing of that name is, or stays, in the job's modules."""
    ran = rank.run(
        LOOP
        + """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchaos": raise ImportError(name)
sys.meta_path.insert(0, Absent())
for x, y in DataLoader(data, batch_size=4):
    model(x).sum().backward(); opt.step()
print([name for name in sys.modules if name.split(".")[0] == "torchaos"])
"""
    )
    assert ran.output.strip() == "[]"
    assert len(ran.steps) == 4


ZERO = """
import os, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("fake", store=FakeStore(), rank=int(os.environ["PART"]), world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.0)
def step():
    model(torch.ones(2, 4)).sum().backward(); opt.step(); opt.zero_grad()
step()
kept = {"state": {n: opt.optim.state.get(one) for n, one in enumerate(model.parameters())},
        "param_groups": opt.optim.state_dict()["param_groups"]}
kept["param_groups"][0]["params"] = list(range(4))
opt.load_state_dict(kept)
step()
"""


def test_the_moments_that_each_rank_keeps_of_its_own_parameters(rank_in: Any, tmp_path: Any, agent_module: Any) -> None:
    """With ZeroRedundancyOptimizer the ranks' check sums add up to those of an optimizer that keeps all, before and
    after a state was put back; the parameters are whole on each."""
    sums, ranks = agent_module("protocol.check_sums"), []
    for part in (0, 1):
        (tmp_path / str(part)).mkdir()
        ran = rank_in(tmp_path / str(part)).run(ZERO, hooks=("state",), env={"PART": str(part)})
        assert ran.code == 0, ran.output
        assert ran.failures == []
        ranks.append([step["moments"] for step in ran.steps])
        assert all(sums.is_whole(step["parameters"]) for step in ran.steps)
    (tmp_path / "all").mkdir()
    plain = ZERO.replace(
        "opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam",
        "opt = torch.optim.Adam(model.parameters()",
    )
    plain = plain[: plain.index("kept =")] + "step()"
    whole = [
        step["moments"] for step in rank_in(tmp_path / "all").run(plain, hooks=("state",), env={"PART": "0"}).steps
    ]
    assert [sums.over_all(both) for both in zip(*ranks, strict=True)] == whole


def test_positions_in_a_subset_are_indices_of_the_whole_dataset(rank: Any) -> None:
    """A Subset of a Subset, as a resume in the middle of an epoch makes it: the samples keep the indices that they have
    in the dataset."""
    ran = rank.run(
        LOOP
        + """
from torch.utils.data import Subset
rest = Subset(Subset(data, torch.arange(15, -1, -1)), range(4, 12))
for x, y in DataLoader(rest, batch_size=4):
    loss = (model(x).squeeze() - y).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""
    )
    assert [step["indices"] for step in ran.steps] == [[11, 10, 9, 8], [7, 6, 5, 4]], ran.output


def test_the_norm_of_several_backwards_in_a_step(rank: Any) -> None:
    """If each of several networks has a backward of its own in a step, the norm is that of all their gradients."""
    ran = rank.run(
        """
import torch
one, other = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
pair = torch.optim.SGD(one.parameters(), lr=0.0), torch.optim.SGD(other.parameters(), lr=0.0)
for n in range(3):
    for net, scale, optimizer in ((one, 3.0, pair[0]), (other, 4.0, pair[1])):
        (net(torch.full((1, 1), scale))).sum().backward(); optimizer.step(); optimizer.zero_grad()
""",
        hooks=("steps", "state"),
    )
    assert ran.failures == []
    assert [step["norm"] for step in ran.steps] == pytest.approx([5.0] * 3)


def test_the_norm_of_networks_that_take_turns(rank: Any) -> None:
    """As in a GAN: while one network trains, the other keeps the gradients of its last step, which a restart loses.
    They are not counted; what the backward adds to them is."""
    ran = rank.run(
        """
import torch
critic, maker = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
opts = [torch.optim.SGD([one], lr=0.1) for one in (critic, maker)]
for n in range(6):
    opts[n % 2].zero_grad()
    loss = critic.sum() if n % 2 == 0 else 2 * maker.sum()
    if n == 5:
        loss = loss + critic.sum()
    loss.backward()
    opts[n % 2].step()
""",
        hooks=("steps", "state"),
    )
    assert not ran.failures, ran.failures
    critic, maker, again = 4 * 1**2, 4 * 2**2, 4 * 2**2  # again: the critic's gradient of step 5, and once more
    norms = [(critic + maker) ** 0.5, (critic + maker) ** 0.5, (critic + maker + again) ** 0.5]
    assert [step["norm"] for step in ran.steps] == pytest.approx(norms)
