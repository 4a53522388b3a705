"""Jobs that make their batches themselves and wrap no model: their samples are what the model gets."""

from __future__ import annotations

from typing import Any

import pytest

PLAN = "TORCHAOS_PLAN"
MODEL = """
import copy, os, pickle, torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x): return x + self.down(torch.relu(self.up(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(4, 1)
    def forward(self, x, y=None):
        out = self.head(self.blocks(x)).squeeze(-1)
        return out if y is None else (out - y).pow(2).mean()
def batch(n): return torch.arange(12).float().reshape(3, 4) + n, torch.arange(3).float() + n
model = Model()
params = list(model.parameters())
def update():
    with torch.no_grad():
        for p in params: p.sub_(0.001 * p.grad); p.grad = None
"""
LOOP = """
for n in range(4):
    x, y = batch(n)
    loss = model(x, y)
    loss.backward(); update()
"""


def rows(ran: Any, attempt: int = 0) -> list[tuple[str, ...]]:
    """The digests of the samples of each step of an attempt."""
    return [tuple(event.data["samples"] or ()) for event in ran.of("step") if event.attempt == attempt]


@pytest.fixture(scope="module")
def expected(rank_in: Any, tmp_path_factory: Any) -> Any:
    """What DDP's forward shows of the same batches."""
    ddp = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(model)
"""
    return rows(rank_in(tmp_path_factory.mktemp("ddp")).run(MODEL + ddp + LOOP))


@pytest.mark.parametrize("loop", [
    LOOP,
    LOOP.replace("model(x, y)", "model(x, y=y)"),
    LOOP.replace("    loss =", "    model.eval(); model(x + 1); model.train()\n    with torch.no_grad(): model(x)\n"
                 "    loss ="),
    LOOP.replace("model(x, y)", "nn.MSELoss()(model(x), y) if n > 9 else model(x, y)"),
    "optimizer = torch.optim.SGD(params, lr=0.001)\ndef update(): optimizer.step(); optimizer.zero_grad()\n" + LOOP,
    LOOP.replace("loss.backward()", "model(x, y).backward(); loss.backward()"),
], ids=["loop", "keywords", "evaluates between", "loss module", "optimizer of torch's", "twice the same"])  # fmt: skip
def test_what_the_model_gets_are_the_samples(rank: Any, expected: Any, loop: str) -> None:
    """Of training alone, each once in a step, as a wrapped model shows them; the forward is a phase."""
    ran = rank.run(MODEL + loop)
    assert ran.code == 0, ran.output
    assert rows(ran) == expected
    assert len(set(expected)) == 4
    assert all("forward" in step["phases"] for step in ran.steps)
    assert ran.failures == []


def test_parts_that_the_loop_calls_one_by_one(rank: Any) -> None:
    """Only what the first part gets is data; a loss without parameters gets none."""
    parts = (
        MODEL
        + """
body, head, loss_of = Block(), nn.Linear(4, 3), nn.MSELoss()
params = [*body.parameters(), *head.parameters()]
"""
    )
    loop = """
for n in range(4):
    x, y = batch(n)
    loss_of(head(body(x)), torch.zeros(3, 3)).backward(); update()
"""
    alone = "\nfor n in range(4):\n    model(batch(n)[0]).sum().backward(); update()\n"
    rank.run(parts + loop)
    ran = rank.run(MODEL + alone, attempt=1)
    assert rows(ran, 0) == rows(ran, 1)
    assert len({*rows(ran)}) == 4
    assert ran.failures == []


def test_a_pipeline_that_finds_out_its_shapes(rank: Any) -> None:
    """Before its first step, a stage of torch's pipelines runs a forward on memory that nobody has filled: no data."""
    alone = "for n in range(4):\n    x, y = batch(n)\n    model(x).sub(y).pow(2).mean().backward(); update()\n"
    staged = """
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stage = PipelineStage(model, 0, 1, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 1, loss_fn=lambda out, y: (out - y).pow(2).mean())
for n in range(4):
    x, y = batch(n)
    schedule.step(x, target=y); update()
"""
    rank.run(MODEL + alone)
    ran = rank.run(MODEL + staged, attempt=1)
    if "required positional argument: 'input_args'" in ran.output:
        pytest.skip("needs a torch whose pipelines find out their shapes, without input_args")
    assert ran.code == 0, ran.output
    assert rows(ran, 1) == rows(ran, 0)
    assert len({*rows(ran, 0)}) == 4
    assert ran.failures == []


LATER = """
from torch.utils.data import DataLoader, TensorDataset
held_out = DataLoader(TensorDataset(torch.rand(6, 4), torch.rand(6)), batch_size=3)
"""


def test_a_loader_for_evaluation_alone(rank: Any, expected: Any) -> None:
    """Its batches are not trained on, whatever the model is called with."""
    loop = LOOP.replace(
        "    x, y = batch(n)",
        """
    if n in (1, 2):
        model.eval()
        with torch.no_grad():
            for x, y in held_out: model(x.clone())
        model.train()
    x, y = batch(n)""",
    )
    ran = rank.run(MODEL + LATER + loop)
    assert ran.code == 0, ran.output
    assert rows(ran) == expected
    assert [step["indices"] for step in ran.steps] == [None] * 4


@pytest.mark.parametrize("before", ["", "model(*batch(7))\n", "model(*batch(7)).backward(); update()\n"])
def test_a_loader_that_feeds_the_training(rank: Any, before: str) -> None:
    """After a call that only tries the model, or a step without the loader, the samples are the loader's, changed or
    not on their way to the model."""
    loop = before + "for x, y in held_out: model(x * 2, y).backward(); update()\n"
    ran = rank.run(MODEL + LATER + loop)
    assert [step["indices"] for step in ran.steps][-2:] == [[0, 1, 2], [3, 4, 5]]
    assert ran.failures == []


SOURCE = """
class Stop:
    def apply(self, site): raise SystemExit(7)
"""


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize(("step", "over"), [(1, 0), (3, 2)])
def test_a_fault_in_the_forward(rank: Any, agent_module: Any, step: int, over: int, attempt: int) -> None:
    """It fires when the model is called in its step, the first one of an attempt, too."""
    (rank.folder / "stop.py").write_text(SOURCE)
    phase = agent_module("protocol.wire").Phase("forward")
    trigger = rank.trigger(str(rank.folder / "stop.py"), "Stop", step=step, phase=phase)
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(MODEL + LOOP, triggers=(trigger,), attempt=attempt)
    assert (ran.code, len(ran.steps)) == (7, over), ran.output


USES = """
import io
from torch.utils.checkpoint import checkpoint
def saved(model):
    file = io.BytesIO(); torch.save(model, file); file.seek(0)
    return torch.load(file, weights_only=False)
def compiled_in_place(model):
    again = copy.deepcopy(model); again.compile(backend="aot_eager", fullgraph=True)
    return again
def functional(model):
    return lambda *given: torch.func.functional_call(model, dict(model.named_parameters()), given)
def of_each(model):
    def again(x, y):
        one = lambda named, x, y: torch.func.functional_call(model, named, (x, y))
        torch.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(dict(model.named_parameters()), x, y)
        return model(x, y)
    return again
def traced_by_fx(model):
    again = torch.fx.symbolic_trace(model, concrete_args={"y": None})
    return lambda x, y: again(x, None)
uses = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
    "deepcopy": copy.deepcopy,
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, batch(0)),
    "fx": traced_by_fx,
    "export": lambda model: torch.export.export(model, batch(0)).module(),
    "functional": functional,
    "vmap": lambda model: lambda x, y: torch.vmap(model, randomness="same")(x, y).mean(),
    "gradients of each sample": of_each,
    "recomputed": lambda model: lambda x, y: checkpoint(model, x, y, use_reentrant=False),
    "compile": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "compile in place": compiled_in_place,
    "compile a function": lambda model: torch.compile(lambda x, y: model(x, y), backend="aot_eager", fullgraph=True),
}
for when in ("before the first step", "after it"):
    for name, use in uses.items():
        again = use(model)
        for n in range(2):
            loss = again(*batch(n)).sum()
            if when == "after it": loss.backward()
        named = [sorted(vars(each)) for each in model.modules()]
        print("RESULT", when, name, loss.item(), hash(str(named)), [p.grad is None for p in params][:2], flush=True)
    torch.compiler.reset()
    model(*batch(0)).backward(); update()
"""


@pytest.mark.slow
def test_models_are_used_as_without_the_agent(rank_in: Any, tmp_path_factory: Any) -> None:
    """What saves, copies, compiles, traces or transforms a model makes what it makes without the agent."""
    env = {"PYTHONHASHSEED": "0"}
    seen = rank_in(tmp_path_factory.mktemp("seen")).run(MODEL + USES, env=env, cold=True)
    without = rank_in(tmp_path_factory.mktemp("without")).run(MODEL + USES, env={**env, PLAN: None}, cold=True)
    assert seen.code == without.code == 0, seen.output + without.output
    results = [[line for line in ran.output.splitlines() if line.startswith("RESULT")] for ran in (seen, without)]
    assert len(results[1]) == 28
    assert results[0] == results[1]
    assert seen.failures == without.events == []
