"""The check sums of the parameters that the agent reports when a save begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

PREPARE = """
import os, threading, torch
folder = os.environ["FOLDER"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1).bfloat16())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    model[1](model[0](torch.ones(1, 4)).bfloat16()).sum().backward(); opt.step(); opt.zero_grad()
def sums():
    kinds = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    for name, one in model.named_parameters():
        print("sum", name, f"{int(one.detach().view(kinds[one.dtype]).sum(dtype=torch.int64)) % 2**64:016x}")
step()
"""
LOADER = "import torch; next(iter(torch.utils.data.DataLoader([1.0])))\n"


def _told(ran: Any, what: str = "parameters") -> list[Any]:
    return [event.data[what] for event in ran.of("checkpoint.parameters")]


def test_each_save_tells_what_is_in_memory(rank: Any) -> None:
    """Name, type, shape and sum of each parameter, whatever wraps the model; again only where something changed."""
    ran = rank.run(
        PREPARE
        + """
sums()
wrapped = torch.nn.Sequential(); wrapped.module = model
torch.save({}, folder + "/a.pt")
torch.save({}, folder + "/b.pt")
model[0].bias.data.zero_()
torch.save({}, folder + "/c.pt")
step()
torch.save({}, folder + "/d.pt")
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    told = _told(ran)
    assert [event.step for event in ran.of("checkpoint.parameters")] == [1, 1, 2]
    printed = dict(line.split()[1:] for line in ran.output.splitlines() if line.startswith("sum"))
    kinds = {"0.weight": "float32 2x4", "0.bias": "float32 2", "1.weight": "bfloat16 1x2", "1.bias": "bfloat16 1"}
    assert told[0] == {name: [kinds[name], printed[name]] for name in kinds}
    assert {name for name in kinds if told[1][name] != told[0][name]} == {"0.bias"}
    assert told[1]["0.bias"][1] == "0" * 16
    assert "kept" not in ran.of("agent.ended")[0].data["unseen"]


def test_what_a_thread_saves_is_not_told_of(rank: Any) -> None:
    """It saves a copy of an earlier time. Nor does it cost anything where nobody asked for it."""
    save = """
one = threading.Thread(target=torch.save, args=({}, folder + "/a.pt")); one.start(); one.join()
"""
    assert _told(rank.run(PREPARE + save, hooks=("steps", "checkpoints", "kept"))) == []
    assert _told(rank.run(PREPARE + "torch.save({}, folder + '/a.pt')", hooks=("steps", "checkpoints"))) == []


@pytest.mark.parametrize(("other", "first", "second"), [
    ("torch.nn.ModuleList([torch.nn.Linear(4, 2)])", "Sequential:", "ModuleList:0"),
    ("torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))", "Sequential#1:", "Sequential#2:1"),
])  # fmt: skip
def test_modules_with_equal_names_are_told_apart(rank: Any, other: str, first: str, second: str) -> None:
    """Two models that share names, as of a generator and a critic: by class, or in the order of their optimizers."""
    ran = rank.run(
        PREPARE
        + f"""
other = {other}
more = torch.optim.SGD(other.parameters(), lr=0.01)
torch.save({{}}, folder + "/a.pt")
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    names = [f"{first}{part}.{what}" for part in (0, 1) for what in ("weight", "bias")]
    assert [{*one} for one in _told(ran)] == [{*names, f"{second}.weight", f"{second}.bias"}]


def test_a_shard_tells_its_part(rank: Any) -> None:
    """Under FSDP2 a parameter has the shape of the whole and the sum of this rank's part, which adds up."""
    ran = rank.run(
        """
import os, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    print("without"); raise SystemExit
folder = os.environ["FOLDER"]
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=0, world_size=1)
model = torch.nn.Linear(4, 2)
whole = int(model.weight.detach().view(torch.int32).sum(dtype=torch.int64)) % 2**64
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
torch.save({}, folder + "/a.pt")
print("sum", f"{whole:016x}")
dist.destroy_process_group()
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    if "without" not in ran.output:  # torch before 2.6
        told = _told(ran)[0]["weight"]
        assert told == ["float32 2x4", "part0-" + ran.output.partition("sum ")[2].split()[0]]


BEGIN = """
import copy, os, random, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
folder = os.environ["FOLDER"]
dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=0, world_size=1)
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.base, self.top = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
        self.base.requires_grad_(False)
        self.register_buffer("count", torch.zeros(1)); self.register_buffer("bias", torch.zeros(1), persistent=False)
        self.drop = torch.nn.Dropout(drop)
    def forward(self, x):
        self.count += 1
        return self.top(self.drop(self.base(x))) + self.bias
net = Net(DROP)
average = torch.optim.swa_utils.AveragedModel(net.top)
model = DistributedDataParallel(net)
opt = torch.optim.Adam(net.top.parameters(), lr=0.01)
def step():
    model(torch.ones(1, 4)).sum().backward(); opt.step(); opt.zero_grad()
"""


def _begun(ran: Any) -> list[Any]:
    found: list[Any] = ran.of("state.begun")
    return found


def test_a_save_of_a_thread_amid_a_step_does_not_make_its_next_forward_a_beginning(rank: Any) -> None:
    """The generators have moved on since the step began, and its inputs were others. The next step is recorded."""
    ran = rank.run(
        BEGIN.replace("DROP", "0.5")
        + """
import threading
def micro(): model(torch.ones(1, 4)).sum().backward()
step()
micro()
thread = threading.Thread(target=torch.save, args=({}, folder + "/a.pt")); thread.start(); thread.join()
micro(); opt.step(); opt.zero_grad()
step()
dist.destroy_process_group()
""",
        hooks=("steps", "samples", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    assert [event.step for event in _begun(ran)] == [0, 2]


def test_what_another_module_computes_is_no_input_that_is_told(rank: Any) -> None:
    """It has a gradient, and follows from the weights of that module."""
    ran = rank.run(
        BEGIN.replace("DROP", "0.5").replace("model(", "model(0 * torch.nn.Linear(4, 4)(torch.ones(4)) + ")
        + "step(); dist.destroy_process_group()\n",
        hooks=("steps", "samples", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    assert _begun(ran)[0].data["inputs"] == {}


def test_the_first_step_tells_the_state_with_which_it_begins(rank: Any) -> None:
    """Also frozen parameters, buffers, moments and generators; again after each save, and then only what is new."""
    ran = rank.run(
        BEGIN.replace("DROP", "0.5")
        + """
step(); step()
torch.save({}, folder + "/a.pt"); torch.save({}, folder + "/b.pt")
step(); step()
dist.destroy_process_group()
""",
        hooks=("steps", "samples", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    assert not ran.failures
    first, after = _begun(ran)
    assert (first.step, after.step) == (0, 2)
    assert set(first.data["parameters"]) == {"top.weight", "top.bias"}
    average = {"AveragedModel:weight", "AveragedModel:bias"}
    assert set(first.data["frozen"]) == {"base.weight", "base.bias"} | average
    assert set(first.data["buffers"]) == {"count", "bias", "AveragedModel:n_averaged"}
    assert first.data["unsaved"] == ["bias"]
    assert first.data["moments"] == {}
    assert (first.data["at"], first.data["drawn"]) == ("forward", ["torch"])
    assert first.data["inputs"] == after.data["inputs"] == {".0.0": ["float32 1x4", f"{4 * 0x3F800000:016x}"]}
    assert {"torch", "python"} <= set(first.data["rng"])
    assert first.data["rng"]["torch"] != after.data["rng"]["torch"]
    assert first.data["rng"]["python"] == after.data["rng"]["python"]
    saved = ran.of("checkpoint.parameters")
    assert len(saved) == 1
    assert set(saved[0].data["moments"]) == {f"top.{p}/exp_avg{s}" for p in ("weight", "bias") for s in ("", "_sq")}
    assert saved[0].data["same"] == ["frozen", "unsaved", "trained"]
    assert saved[0].data["buffers"] != first.data["buffers"]
    assert after.data["same"] == ["parameters", "frozen", "buffers", "moments", "unsaved", "trained", "modes"]


def test_the_modes_of_modules_are_told(rank: Any) -> None:
    """Of the outermost modules, and of those whose mode is not that of the module around them, whatever wraps them; as
    they are when the backward begins."""
    ran = rank.run(
        PREPARE
        + """
wrapped = torch.nn.Sequential(); wrapped.module = model
teacher = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1)}).eval()
torch.save({}, folder + "/a.pt")
step()
model.eval(); model[1].train()
torch.save({}, folder + "/b.pt")
step()
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    _first, before, after = _begun(ran)
    assert before.data["modes"] == {"": "train", "ModuleDict:": "eval"}
    assert after.data["modes"] == {"": "eval", "1": "train", "ModuleDict:": "eval"}


@pytest.mark.parametrize(("before", "at"), [("", "forward"), (LOADER, "backward")])
def test_what_begins_a_step_without_a_wrapper(rank: Any, before: str, at: str) -> None:
    """The forward of what the loop calls; the backward, if a data loader feeds it."""
    ran = rank.run(before + PREPARE, hooks=("steps", "samples", "checkpoints", "kept"))
    assert [(one.step, one.data["at"]) for one in _begun(ran)] == [(0, at)]
    assert set(_begun(ran)[0].data["parameters"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_model_that_draws_no_random_numbers(rank: Any) -> None:
    """It is seen to draw none."""
    script = BEGIN.replace("DROP", "0.0") + "step(); dist.destroy_process_group()"
    ran = rank.run(script, hooks=("steps", "samples", "checkpoints", "kept"))
    assert [one.data["drawn"] for one in _begun(ran)] == [[]]


def test_a_load_is_a_begin(rank: Any) -> None:
    """The steps before it may be a warm-up."""
    more = "step(); torch.save({}, folder + '/a.pt'); torch.load(folder + '/a.pt'); step(); step()"
    ran = rank.run(PREPARE + more, hooks=("steps", "checkpoints", "kept"))
    assert [one.step for one in _begun(ran)] == [0, 2]


def test_a_state_put_back_from_memory_is_a_begin(rank: Any) -> None:
    """As after steps that only warm up. A module that nobody trains, such as a target network, begins nothing."""
    more = """
import copy
first, start, target = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict()), copy.deepcopy(model)
step(); target.load_state_dict(model.state_dict()); step()
model.load_state_dict(first); opt.load_state_dict(start)
step(); step()
"""
    begun = _begun(rank.run(PREPARE + more, hooks=("steps", "checkpoints", "kept")))
    assert [one.step for one in begun] == [0, 3]


@pytest.mark.parametrize("key", ["one", "id(one)", "place", "'0.weight'"])
def test_what_plain_optimizers_keep_is_found(rank: Any, key: str) -> None:
    """Whether it is kept by parameter, by its number, by its name, or in a list as long as that of the parameters."""
    ran = rank.run(
        PREPARE.replace("model.parameters()", "model[1].parameters()")
        + f"""
class Plain:
    def __init__(self, params): self.params, self.m, self.buffers = params, {{}}, [torch.zeros(2, 4)]
    def step(self):
        for place, one in enumerate(self.params):
            self.m[{key}] = {{"sum": torch.ones(2)}}
plain = Plain([model[0].weight]); plain.step()
torch.save({{}}, folder + "/a.pt")
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    assert not ran.failures
    kept = {**_begun(ran)[0].data, **ran.of("checkpoint.parameters")[0].data}
    assert set(kept["moments"]) == {"0.weight/m.sum", "0.weight/buffers"}
    assert set(kept["frozen"]) == {"0.weight", "0.bias"}


def test_a_job_of_plain_optimizers_alone_has_one_name_for_each_tensor(rank: Any) -> None:
    """Before the first backward it is not known what is trained. What the first step began with has the names that a
    save gives, all the same."""
    ran = rank.run(
        """
import os, torch
from torch import distributed as dist
folder = os.environ["FOLDER"]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
class Plain:
    def __init__(self, params): self.params = list(params); self.m = [torch.zeros_like(p) for p in self.params]
    @torch.no_grad()
    def step(self):
        for p, m in zip(self.params, self.m): m.lerp_(p.grad, 0.1); p.sub_(m); p.grad = None
plain = Plain(model.parameters())
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward(); plain.step()
    torch.save({}, folder + "/a.pt")
dist.destroy_process_group()
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    first, kept = _begun(ran)[0].data, ran.of("checkpoint.parameters")[0].data
    assert set(first["parameters"]) == set(kept["parameters"]) == {"weight", "bias"}
    assert set(first["moments"]) == set(kept["moments"]) == {"weight/m", "bias/m"}


@pytest.mark.parametrize("updates", ["p.sub_(0.1)", "pass"])
def test_the_state_of_a_step_covers_what_a_plain_optimizer_trains(rank: Any, updates: str) -> None:
    """Beside an optimizer of torch's: a parameter that only the plain one has changed changes the digest."""
    both = PREPARE.replace("model.parameters()", "model[1].parameters()").replace("lr=", "lr=0 * ")
    ran = rank.run(
        both.removesuffix("step()\n")
        + f"""
class Plain:
    def __init__(self, params): self.params = params
    @torch.no_grad()
    def step(self):
        for p in self.params: {updates}
plain = Plain([model[0].weight])
for _ in range(4): plain.step(); step()
""",
        hooks=("steps", "checkpoints", "state", "kept"),
    )
    assert ran.code == 0, ran.output
    digests = [event.data["parameters"] for event in ran.of("step")]
    assert len(set(digests)) == (4 if updates != "pass" else 1), digests


def test_tensors_that_are_no_numbers_are_left_out(rank: Any) -> None:
    """Sparse buffers, and parameters that are not made yet; the hook goes on."""
    more = """
model.register_buffer("sparse", torch.eye(2).to_sparse()); model.register_buffer("flag", torch.tensor(True))
model.add_module("lazy", torch.nn.LazyLinear(2))
torch.save({}, folder + "/a.pt")
"""
    ran = rank.run(PREPARE + more, hooks=("steps", "checkpoints", "kept"))
    assert not ran.failures
    assert set(ran.of("checkpoint.parameters")[0].data["buffers"]) == {"flag"}


def test_equal_parts_have_equal_places(agent_module: Any) -> None:
    """A tensor that is shared out over one dimension of a mesh alone, by that mesh or by the whole mesh: ranks with the
    same part write the same place, and each other part has another."""
    sums = agent_module("protocol.check_sums")

    class Placement:
        def __init__(self, replicate: bool) -> None:
            self.is_replicate = lambda: replicate

    def written(place: tuple[int, ...], *replicate: bool) -> str:
        mesh = SimpleNamespace(get_coordinate=lambda: place)
        part = SimpleNamespace(_local_tensor=torch.ones(2), placements=[*map(Placement, replicate)], device_mesh=mesh)
        return str(sums.plain_of_each(torch, [part])[0])

    ones = f"{2 * 0x3F800000:016x}"
    assert [written((0, at), False, True) for at in (0, 1)] == ["part0-" + ones] * 2
    assert written((1,), False) == written((1, 0), False, True) == "part1-" + ones
    assert written((1, 0), False, False) == "part1.0-" + ones
    assert written((1, 0), True, True) == ones


def test_which_parameters_are_trained_is_told(rank: Any) -> None:
    """Those that get gradients and belong to an optimizer, of torch's or of a plain class: one that is frozen later,
    and one that is in no optimizer's list, are not."""
    ran = rank.run(
        PREPARE
        + """
class Sign:
    def __init__(self, params): self.params = list(params)
    @torch.no_grad()
    def step(self):
        for p in self.params: p.sub_(p.grad.sign(), alpha=0.01)
more = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(2, 1)})
sign = Sign(more["a"].parameters())
torch.save({}, folder + "/a.pt")
step()
model[0].bias.requires_grad_(False)
torch.save({}, folder + "/b.pt")
step()
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    before, after = _told(ran, "trained")
    every = {"0.weight", "0.bias", "1.weight", "1.bias", "ModuleDict:a.weight", "ModuleDict:a.bias"}
    assert set(before) == every
    assert set(after) == every - {"0.bias"}


def test_what_the_job_froze_is_found(rank: Any) -> None:
    """A job calls `gc.freeze` to keep garbage collections short. Its model and its optimizers of plain classes are
    named all the same, and what it makes later too."""
    job = """
class Sign:
    def __init__(self, params): self.params, self.m = list(params), [torch.ones(2) for _ in params]
    @torch.no_grad()
    def step(self):
        for p in self.params: p.sub_(p.grad.sign(), alpha=0.01)
more = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1)})
sign = Sign(list(more.parameters()))
FREEZE
later = torch.nn.Bilinear(1, 1, 1)
torch.save({}, folder + "/a.pt")
"""
    told = []
    for attempt, freeze in enumerate(("", "import gc; gc.freeze(); gc.freeze()")):
        ran = rank.run(PREPARE + job.replace("FREEZE", freeze), hooks=("steps", "checkpoints", "kept"), attempt=attempt)
        assert ran.code == 0, ran.output
        (event,) = (event for event in ran.of("checkpoint.parameters") if event.attempt == attempt)
        told.append({what: sorted(event.data[what]) for what in ("parameters", "frozen", "moments", "trained")})
    assert told[0] == told[1]
    assert "Bilinear:weight" in told[0]["frozen"]
    assert "ModuleDict:a.weight/m" in told[0]["moments"]


def test_an_optimizer_that_holds_modules(rank: Any) -> None:
    """An optimizer of a plain class may hold modules, such as the tables of a recommender, and a list of what it keeps
    for each. An object that holds modules and keeps nothing for them is none."""
    ran = rank.run(
        PREPARE
        + """
class Rowwise:
    def __init__(self, tables, lr): self.tables, self.lr, self.acc = tables, lr, [torch.ones(2) for _ in tables]
    @torch.no_grad()
    def step(self):
        for table, acc in zip(self.tables, self.acc): table.weight.sub_(self.lr * table.weight.grad / acc)
class Watcher:
    def __init__(self, module): self.module, self.lr = module, 0.1
    def step(self): pass
tables = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, bias=False) for name in "ab"})
other = torch.nn.Bilinear(1, 1, 1, bias=False)
keeps = Rowwise([tables["b"], tables["a"]], 0.1), Watcher(other)
torch.save({}, folder + "/a.pt")
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    tables = {f"ModuleDict:{name}.weight" for name in "ab"}
    assert {*_told(ran, "trained")[0]} == {"0.weight", "0.bias", "1.weight", "1.bias"} | tables
    assert {*_told(ran, "moments")[0]} >= {f"{name}/acc" for name in tables}


def test_what_only_an_optimizer_holds_is_named_by_its_place_there(rank: Any) -> None:
    """Float32 copies of weights, or the anchor of an outer optimizer (DiLoCo), are in no module. They are trained and
    carried all the same."""
    ran = rank.run(
        PREPARE
        + """
anchor = [p.detach().clone().requires_grad_() for p in model.parameters()]
outer = torch.optim.SGD(anchor, lr=0.5, momentum=0.9)
for p in anchor: p.grad = torch.ones_like(p)
outer.step()
torch.save({}, folder + "/a.pt")
""",
        hooks=("steps", "checkpoints", "kept"),
    )
    assert ran.code == 0, ran.output
    names = [f"SGD#2:param_groups.0.{place}" for place in range(4)]
    assert sorted(_told(ran)[0]) == sorted(["0.weight", "0.bias", "1.weight", "1.bias", *names])
    assert {*_told(ran, "moments")[0]} == {f"{name}/momentum_buffer" for name in names}


@pytest.mark.parametrize("seen", [True, False])
def test_an_optimizer_made_anew_on_the_way_is_as_one_of_a_resumed_process(rank: Any, seen: bool) -> None:
    """A job replaces an optimizer on its way, and the old one still exists; it also wraps its model again. A process
    that resumes after that makes only the new one, in another order: it reports the same steps, rates and check sums,
    also if no save of the process was `seen`."""
    job = """
import os, pickle, torch
def save(state, path): torch.save(state, path) if SEEN else pickle.dump(state, open(path, "wb"))
def load(path): return torch.load(path, weights_only=True) if SEEN else pickle.load(open(path, "rb"))
path, resumed = os.environ["FOLDER"] + "/a.pt", os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
torch.manual_seed(0)
head, body = torch.nn.Linear(2, 1), torch.nn.Linear(4, 2)
model = torch.nn.ModuleList([head, body])
def adam(*parts): return torch.optim.AdamW([{"params": [*part.parameters()], "lr": 0.1 / len(parts)} for part in parts])
state = load(path) if resumed else None
first = adam(head) if not resumed else adam(head, head2 := torch.nn.Linear(2, 1))
sgd = torch.optim.SGD(body.parameters(), lr=0.2, momentum=0.9)
if resumed:
    model.append(head2)
    model.load_state_dict(state["model"]); first.load_state_dict(state["first"]); sgd.load_state_dict(state["sgd"])
begun, used = (state["step"], first) if resumed else (0, first)
for number in range(begun + 1, 9):
    if number == 4 and not resumed:
        model = torch.nn.ModuleList([head, body, torch.nn.Linear(2, 1)]); used = adam(head, model[2])
    loss = sum(part(body(torch.ones(1, 4))).sum() for part in [head, *model[2:]]).tanh()
    loss.backward(); sgd.step(); used.step(); sgd.zero_grad(); used.zero_grad()
    if number == 6 and not resumed:
        save({"model": model.state_dict(), "first": used.state_dict(), "sgd": sgd.state_dict(), "step": 6}, path)
"""
    job, hooks = job.replace("SEEN", str(seen)), ("steps", "samples", "state", "lr", "checkpoints", "kept")
    straight = rank.run(job, hooks=hooks)
    assert straight.code == 0, straight.output
    whole = rank.run(job, hooks=hooks, attempt=1)
    assert whole.code == 0, whole.output
    assert not whole.failures
    steps: dict[int, dict[int, Any]] = {0: {}, 1: {}}
    for event in whole.of("step"):
        steps[event.attempt][event.step + 6 * event.attempt] = [
            event.data[what] for what in ("lr", "parameters", "moments", "sketch")
        ]
    assert (len(steps[0]), [*steps[1]]) == (8, [7, 8])
    assert steps[1] == {number: steps[0][number] for number in (7, 8)}
