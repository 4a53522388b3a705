"""Moments in a real rank: triggers fire, hold the rank, expire, wait until they are armed, and never fire twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from waiting import wait_until

INJECTOR = """
from __future__ import annotations
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar
from torchaos.harness.base_classes import Fault
from torchaos.harness.base_classes import Seconds
if TYPE_CHECKING:
    from torchaos.harness.interfaces import Site

@dataclass(frozen=True)
class Kill(Fault):
    after: Seconds = 0.0
    name: ClassVar[str] = "test.kill"
    def apply(self, site: Site) -> None:
        site.signal(signal.SIGKILL)

@dataclass(frozen=True)
class Raise(Fault):
    text: str = "injected"
    def apply(self, site: Site) -> None:
        raise RuntimeError(self.text)

@dataclass(frozen=True)
class Nothing(Fault):
    def apply(self, site: Site) -> None:
        pass
"""

JOB = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.ones(64, 4))
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
path = os.environ["FOLDER"] + "/last.pt"
start = torch.load(path)["step"] if os.path.exists(path) else 0
for n, (x,) in enumerate(DataLoader(data, batch_size=8)):
    step = start + n + 1
    if step > 6: break
    opt.zero_grad()
    loss = model(x).sum()
    print("backward", step, model.weight.grad is None, flush=True)
    loss.backward()
    opt.step()
    if step in (2, 4): torch.save({"step": step}, path)
    print("done", step, flush=True)
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "faults.py").write_text(INJECTOR)
    return str(tmp_path / "faults.py")


@pytest.fixture
def phase(agent_module: Callable[[str], Any]) -> Any:
    return agent_module("protocol.wire").Phase


def missed(ran: Any) -> list[str]:
    return [event.data["reason"] for event in ran.of("fault.missed")]


@pytest.mark.parametrize(
    ("name", "before", "last_line"),
    [
        (None, 2, "backward 2 True"),
        ("data", 2, "done 2"),
        ("forward", 2, "done 2"),
        ("backward", 2, "backward 3 True"),
        ("optimizer", 2, "backward 3 True"),
    ],
)
def test_kill_lands_in_its_phase(
    rank: Any, source: str, phase: Any, name: str | None, before: int, last_line: str
) -> None:  # fmt: skip
    """A rank is killed in step 3, in the named phase, after two steps and before any more is done."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(JOB, triggers=(rank.trigger(source, "Kill", step=3, phase=name and phase(name)),))
    assert ran.code == -9, ran.output
    assert ran.output.splitlines()[-1] == last_line
    assert [event.kind.value for event in ran.of("step", "fault.applying", "fault.applied")] == [
        *["step"] * before, "fault.applying",
    ]  # fmt: skip
    applying = ran.of("fault.applying")[0].data
    assert (applying["phase"], applying["global_step"]) == (name, 3)
    assert (page.read(page.FIRED), page.read(page.STATE)) == (1, 2)


def test_first_step(rank: Any, source: str) -> None:
    """Step 1 without a phase is the first phase that the rank enters."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(JOB, triggers=(rank.trigger(source, "Kill", step=1),))
    assert ran.code == -9
    assert "backward" not in ran.output
    assert ran.of("fault.applying")[0].data["phase"] == "data"


def test_when_a_save_has_written_its_files(rank: Any, source: str, phase: Any) -> None:
    """`checkpoint_written` comes when all that a save writes is on disk, and before it comes back to the job: a rank
    that is killed there leaves a whole file with its manifest, and no end of a save."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    trigger = rank.trigger(source, "Kill", step=3, phase=phase.CHECKPOINT_WRITTEN)
    ran = rank.run(JOB, hooks=("steps", "checkpoints"), triggers=(trigger,))
    assert ran.code == -9, ran.output
    assert ran.output.splitlines()[-1] == "backward 2 True"
    assert [event.kind.value for event in ran.of("checkpoint.save_begin", "checkpoint.save_end")] == [
        "checkpoint.save_begin"
    ]
    assert torch.load(rank.folder / "last.pt") == {"step": 2}
    assert len(list((rank.folder / "agent" / "manifests").glob("*.json"))) == 1


def test_when_a_save_in_the_background_has_written(rank: Any, source: str, phase: Any) -> None:
    """Also of an `async_save`, in its own thread: by number, since training goes on meanwhile."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(
        """
import os, torch, torch.distributed as dist, warnings
warnings.simplefilter("ignore")
from torch.distributed.checkpoint.state_dict_saver import async_save
dist.init_process_group("gloo", init_method="file://" + os.environ["FOLDER"] + "/rdzv", rank=0, world_size=1)
for step in (1, 2):
    async_save({"w": torch.ones(4)}, checkpoint_id=os.environ["FOLDER"] + f"/step-{step}").result()
    print("saved", step, flush=True)
""",
        hooks=("steps", "checkpoints"),
        triggers=(rank.trigger(source, "Kill", phase=phase.CHECKPOINT_WRITTEN, nth=2),),
    )
    assert ran.code == -9, ran.output
    assert ran.output.split("\n")[-2] == "saved 1"
    assert (rank.folder / "step-2" / ".metadata").exists()


EPOCHS = """
import itertools, os, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.ones(24, 4))
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, **eval(os.environ.get("MORE", "{}")))
for epoch in range(3):
    for (x,) in itertools.islice(loader, int(os.environ.get("COUNTED", 100))):
        model(x).sum().backward()
        opt.step()
    for (x,) in DataLoader(data, batch_size=8):
        model(x)
    print("validated", epoch, flush=True)
"""


@pytest.mark.parametrize("more", ["{}", "{'num_workers': 1, 'persistent_workers': True}"])
@pytest.mark.parametrize("nth", [1, 2])
def test_when_a_further_epoch_begins(
    rank: Any, source: str, phase: Any, monkeypatch: pytest.MonkeyPatch, more: str, nth: int
) -> None:
    """`new_epoch` comes after all that the job does at the end of an epoch, and before a gradient of the next one. The
    loader of a validation, which also ends, makes no epoch."""
    monkeypatch.setenv("MORE", more)
    page = rank.page()
    page.write(page.ALLOWED, 1)
    trigger = rank.trigger(source, "Kill", attempt=0, phase=phase.NEW_EPOCH, nth=nth)
    ran = rank.run(EPOCHS, hooks=("steps", "samples"), triggers=(trigger,))
    assert ran.code == -9, ran.output
    assert ran.output.splitlines()[-1] == f"validated {nth - 1}"
    assert len(ran.of("step")) == 3 * nth


@pytest.mark.parametrize("more", ["{}", "{'num_workers': 1, 'persistent_workers': True}"])
@pytest.mark.parametrize("nth", [1, 2])
def test_when_a_further_epoch_begins_in_a_loop_that_counts(
    rank: Any, source: str, phase: Any, monkeypatch: pytest.MonkeyPatch, more: str, nth: int
) -> None:
    """The same with a loop such as Lightning's, which counts the batches and never asks for more than there are."""
    monkeypatch.setenv("COUNTED", "3")
    test_when_a_further_epoch_begins(rank, source, phase, monkeypatch, more, nth)


def test_raise_reaches_the_job(rank: Any, source: str, phase: Any) -> None:
    """What an injector raises comes out of the user's own call, unchanged, and is no failure of the agent."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(JOB, triggers=(rank.trigger(source, "Raise", step=2, phase=phase.BACKWARD),))
    assert ran.code == 1
    assert "RuntimeError: injected" in ran.output
    assert "loss.backward()" in ran.output
    assert ran.failures == []


@pytest.mark.one_version
def test_a_fault_that_returns_is_applied(rank: Any, source: str, phase: Any) -> None:
    """An injector that returns leaves an applied event, and the job goes on to its end."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(JOB, triggers=(rank.trigger(source, "Nothing", step=2, phase=phase.CHECKPOINT_WRITE, nth=1),))
    assert ran.code == 0
    assert missed(ran) == ["in step 2 the phase checkpoint_write was entered 0 times, and the Moment is at time 1"]
    page.write(page.STATE, 0)
    trigger = rank.trigger(source, "Nothing", step=3, phase=phase.CHECKPOINT_WRITE, hold_s=1.0)
    ran = rank.run(JOB, triggers=(trigger,), attempt=1)
    assert len(missed(ran)) == 2  # it resumed from step 4, and step 3 is behind it
    (rank.folder / "last.pt").unlink(missing_ok=True)
    ran = rank.run(JOB, triggers=(trigger,), attempt=2)
    assert [event.attempt for event in ran.of("fault.applied")] == [2]


@pytest.mark.one_version
def test_does_not_fire_again(rank: Any, source: str) -> None:
    """The page survives the rank: a restarted one passes the same step unharmed, and without waiting."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    trigger = rank.trigger(source, "Kill", step=3, hold_s=60.0)
    assert rank.run(JOB, triggers=(trigger,)).code == -9
    (rank.folder / "last.pt").unlink(missing_ok=True)
    ran = rank.run(JOB, triggers=(trigger,), attempt=1)
    assert ran.code == 0, ran.output
    assert len(ran.of("fault.applying")) == 1
    assert missed(ran) == []


@pytest.mark.one_version
def test_fires_twice_when_allowed_twice(rank: Any, source: str) -> None:
    """A fault that is allowed twice hits the restarted rank as well."""
    page = rank.page()
    page.write(page.ALLOWED, 2)
    trigger = rank.trigger(source, "Kill", step=2)
    codes = [rank.run(JOB, triggers=(trigger,), attempt=attempt).code for attempt in range(3)]
    assert codes == [-9, -9, 0]


@pytest.mark.one_version
def test_only_its_rank_and_attempt(rank: Any, source: str) -> None:
    """Triggers for another rank, another attempt or another process are not ours."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(JOB, triggers=(rank.trigger(source, "Kill", step=2, pacer=1),))
    assert (ran.code, missed(ran)) == (0, [])
    (rank.folder / "last.pt").unlink(missing_ok=True)
    ran = rank.run(JOB, triggers=(rank.trigger(source, "Kill", step=2, attempt=5),), attempt=1)
    assert (ran.code, missed(ran)) == (0, [])
    (rank.folder / "last.pt").unlink(missing_ok=True)
    page.write(page.ARMED_PID, 1)
    ran = rank.run(JOB, triggers=(rank.trigger(source, "Kill", step=2, hold_s=0.2),), attempt=2)
    assert ran.code == 0
    assert missed(ran) == ["not armed in time: the rank reached the moment of the fault and waited as long as it may"]


@pytest.mark.one_version
def test_armed_late(rank: Any, source: str) -> None:
    """A rank that reaches the Moment before it is armed waits for the word."""
    page = rank.page()
    process = rank.start(JOB, triggers=(rank.trigger(source, "Kill", step=3, hold_s=60.0),))
    wait_until(lambda: any(e.kind.value == "step" and e.step == 2 for e in rank.read()), state=rank.read)
    page.write(page.ALLOWED, 1)
    ran = rank.wait(process)
    assert ran.code == -9
    assert "done 3" not in ran.output


@pytest.mark.one_version
def test_outside_trigger(rank: Any, source: str) -> None:
    """Without a step the trigger is due at the first phase after it was armed, and nobody waits before."""
    page = rank.page()
    process = rank.start(
        JOB.replace("if step > 6: break", "pass").replace("DataLoader(data, batch_size=8)", "forever()")
        .replace("for n,", "def forever():\n    while True: yield from DataLoader(data, batch_size=8)\nfor n,"),
        triggers=(rank.trigger(source, "Kill"),),
    )  # fmt: skip
    wait_until(lambda: any(e.kind.value == "step" for e in rank.read()), state=rank.read)
    page.write(page.ALLOWED, 1)
    assert rank.wait(process).code == -9


def test_hold_and_go(rank: Any, phase: Any) -> None:
    """A rank that is held stands still in its phase until the harness says go."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    process = rank.start(JOB, triggers=(rank.trigger(step=3, phase=phase.BACKWARD, hold_s=60.0),))
    wait_until(lambda: page.read(page.STATE) == 1, state=rank.read)
    assert [event.step for event in rank.read() if event.kind.value == "step"] == [1, 2]
    assert page.read(page.FIRED) == 0
    page.write(page.GO, 1)
    ran = rank.wait(process)
    assert ran.code == 0
    assert [event.data["global_step"] for event in ran.of("fault.held")] == [3]
    assert (page.read(page.FIRED), page.read(page.STATE)) == (1, 3)


@pytest.mark.one_version
def test_a_rank_that_died_in_its_hold_is_not_held_again(rank: Any, phase: Any) -> None:
    """Whatever killed the held rank was the fault: once the harness has said go, its successor passes unharmed, and
    without waiting."""
    page = rank.page()
    trigger = rank.trigger(step=3, phase=phase.BACKWARD, hold_s=60.0)
    process = rank.start(JOB, triggers=(trigger,))
    page.write(page.ARMED_PID, process.pid)
    page.write(page.ALLOWED, 1)
    wait_until(lambda: page.read(page.STATE) == 1, state=rank.read)
    process.kill()
    page.write(page.GO, 1)
    assert rank.wait(process).code == -9
    (rank.folder / "last.pt").unlink(missing_ok=True)
    ran = rank.run(JOB, triggers=(trigger,), attempt=1)
    assert ran.code == 0, ran.output
    assert (len(ran.of("fault.held")), missed(ran)) == (1, [])
    assert page.read(page.FIRED) == 0


@pytest.mark.parametrize("early", [True, False])
def test_a_fault_that_is_called_off_costs_no_time(rank: Any, phase: Any, early: bool) -> None:
    """The harness will not arm it any more: a rank that comes to the Moment, or waits there already, goes on."""
    page = rank.page()
    if early:
        page.write(page.ARMED_PID, page.CALLED_OFF)
    process = rank.start(JOB, triggers=(rank.trigger(step=3, phase=phase.BACKWARD, hold_s=600.0),))
    if not early:
        wait_until(lambda: any(e.kind.value == "step" and e.step == 2 for e in rank.read()), state=rank.read)
        page.write(page.ARMED_PID, page.CALLED_OFF)
    ran = rank.wait(process)
    assert ran.code == 0, ran.output
    assert (ran.of("fault.held"), missed(ran)) == ([], [])


def test_hold_at_the_start(rank: Any, phase: Any) -> None:
    """A rank that is to be held at its start waits there until it is armed, and has not done a line of the job's by
    then; it is held once in its attempt."""
    page = rank.page()
    trigger = rank.trigger(attempt=0, phase=phase.START, hold_s=60.0)
    process = rank.start(f"import torch\nprint('first line', flush=True)\n{JOB}", triggers=(trigger,))
    wait_until(lambda: any(event.kind.value == "agent.started" for event in rank.read()), state=rank.read)
    page.write(page.ALLOWED, 1)  # later than it came there, or as late
    wait_until(lambda: page.read(page.STATE) == 1, state=rank.read)
    assert [event.kind.value for event in rank.read()] == ["agent.started", "fault.held"]
    page.write(page.GO, 1)
    ran = rank.wait(process)
    assert ran.code == 0, ran.output
    assert len(ran.of("fault.held")) == 1
    assert ran.output.startswith("first line")


def test_hold_expires(rank: Any, phase: Any) -> None:
    """Where the harness never says go, the rank goes on by itself and says so."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(JOB, triggers=(rank.trigger(step=3, phase=phase.BACKWARD, hold_s=0.1),))
    assert ran.code == 0
    assert missed(ran) == ["the time to hold the rank was over: the rank went on by itself"]
    assert page.read(page.STATE) == 4
    assert len(ran.steps) == 6


@pytest.mark.one_version
def test_resumed_rank_asks_for_its_base(rank: Any, source: str) -> None:
    """A rank that loaded a checkpoint waits after its first step until it is told where it stands, then fires."""
    page = rank.page()
    page.write(page.ALLOWED, 2)
    trigger = rank.trigger(source, "Kill", step=4, hold_s=60.0)
    assert rank.run(JOB, triggers=(trigger,)).code == -9
    process = rank.start(JOB, triggers=(trigger,), attempt=1)
    wait_until(lambda: any(e.kind.value == "step" and e.attempt == 1 for e in rank.read()), state=rank.read)
    page.write(page.BASE, 2)
    page.write(page.BASE_ATTEMPT, 1)
    ran = rank.wait(process)
    assert ran.code == -9, ran.output
    assert ran.output.splitlines()[-1] == "backward 3 True"  # right after the step was over, inside optimizer.step
    assert [event.data["global_step"] for event in ran.of("fault.applying")] == [4, 4]


GOES_BACK = """
import os, torch
model = torch.nn.Linear(4, 1)
opt = torch.optim.Adam(model.parameters(), lr=0.01)
path, step, back = os.environ["FOLDER"] + "/last.pt", 0, False
while step < 8:
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    step += 1
    print("done", step, flush=True)
    if step == 2: torch.save({"step": step, "opt": opt.state_dict()}, path)
    if step == 5 and not back:
        kept, back = torch.load(path, weights_only=True), True
        opt.load_state_dict(kept["opt"])
        step = kept["step"]
"""


def test_a_numbered_step_after_a_rollback_within_the_process(rank: Any, source: str) -> None:
    """Steps 3 to 5 are done again: what is to come in step 7 comes when step 6 was done, the ninth of this attempt."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(GOES_BACK, triggers=(rank.trigger(source, "Kill", step=7),))
    assert ran.code == -9, ran.output
    assert [int(line.split()[1]) for line in ran.output.splitlines()] == [1, 2, 3, 4, 5, 3, 4, 5]
    assert ran.of("fault.applying")[0].data["global_step"] == 7


TRIES_AGAIN = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
path, tries = os.environ["FOLDER"] + "/last.pt", []
def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    tries.append((model, opt))  # nothing is collected
    kept = torch.load(path) if os.path.exists(path) else {"step": 0}
    if kept["step"]:
        model.load_state_dict(kept["model"])
        opt.load_state_dict(kept["opt"])
    data = TensorDataset(torch.arange(64.0).reshape(16, 4)[2 * kept["step"]:])
    for n, (x,) in enumerate(DataLoader(data, batch_size=2)):
        opt.zero_grad()
        loss = model(x).sum()
        loss.backward()
        if OWN == (kept["step"] + n + 1, "optimizer") and len(tries) == 1:
            opt.param_groups[0]["betas"] = None
        opt.step()
        step = kept["step"] + n + 1
        print("done", step, flush=True)
        if step == KEEP:
            torch.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()}, path)
for _ in range(2):
    try:
        train()
        break
    except Exception as error:
        print("again:", type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("keep", [2, 0])
@pytest.mark.parametrize("name", ["data", "forward", "backward", "optimizer", None])
def test_a_job_that_catches_the_exception_is_still_seen(
    rank: Any, source: str, phase: Any, name: str | None, keep: int
) -> None:
    """What is raised in a phase of step 4, by a fault or (None) by the optimizer itself, is caught, and the job trains
    on in the same process with a new model and optimizer, from its checkpoint or from the start. Each later step is
    seen, with its own loss and samples only."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    triggers = () if name is None else (rank.trigger(source, "Raise", step=4, phase=phase(name)),)
    job = TRIES_AGAIN.replace("OWN", str((4, "optimizer") if name is None else None)).replace("KEEP", str(keep))
    ran = rank.run(job, triggers=triggers, hooks=("steps", "loss", "samples", "checkpoints"))
    assert ran.code == 0, ran.output
    done = [int(line.split()[1]) for line in ran.output.splitlines() if line.startswith("done")]
    assert done == [1, 2, 3, *range(keep + 1, 9)], ran.output
    steps = [event.data for event in ran.of("step")]
    assert len(steps) == len(done)
    assert [len(step["indices"]) for step in steps] == [2] * len(done)
    by_step: dict[int, set[float]] = {}
    for step, data in zip(done, steps, strict=True):
        by_step.setdefault(step, set()).add(*data["losses"])
    assert {step for step, losses in by_step.items() if len(losses) > 1} == set()
    assert ran.failures == []


WARMS_UP = """
import copy, torch
model = torch.nn.Linear(4, 1)
opt = torch.optim.Adam(model.parameters(), lr=0.01)
first, start = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
for step in (-2, -1, 0, 1, 2, 3, 4, 5):
    if step == 1: model.load_state_dict(first); opt.load_state_dict(start)
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    print("done", step, flush=True)
"""


@pytest.mark.parametrize("counts", [True, False])
def test_a_numbered_step_after_a_warm_up(rank: Any, source: str, counts: bool) -> None:
    """Three steps warm up, and the state of the start is put back from memory: the job's step 5 is over with the eighth
    of the process. The optimizer's counter shows it, or the parameters do."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    job = WARMS_UP if counts else WARMS_UP.replace("Adam", "SGD")
    ran = rank.run(job, triggers=(rank.trigger(source, "Kill", step=6),), hooks=("steps", "checkpoints", "kept"))
    assert ran.code == -9, ran.output
    assert ran.output.splitlines()[-1] == "done 4"
    assert ran.of("fault.applying")[0].data["global_step"] == 6


def test_a_rollback_that_no_counter_tells_of(rank: Any, source: str) -> None:
    """Plain SGD counts no steps: the trigger is missed, with what to write instead."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(GOES_BACK.replace("Adam", "SGD"), triggers=(rank.trigger(source, "Kill", step=7),))
    assert ran.code == 0, ran.output
    assert len(missed(ran)) == 1
    assert "with `time` or `after`" in missed(ran)[0]


@pytest.mark.one_version
def test_base_that_never_comes(rank: Any, source: str) -> None:
    """Where nobody says which step a resumed attempt began with, the trigger is missed: no guess."""
    page = rank.page()
    trigger = rank.trigger(source, "Kill", step=5, hold_s=0.1)
    rank.run("import os, torch; torch.save({'step': 2}, os.environ['FOLDER'] + '/last.pt')", attempt=0)
    page.write(page.ALLOWED, 1)
    ran = rank.run(JOB, triggers=(trigger,), attempt=1)
    assert ran.code == 0
    assert missed(ran) == [
        "a checkpoint was loaded, and the harness did not find out with which step this attempt began"
    ]


def test_injector_that_cannot_be_loaded(rank: Any) -> None:
    """An injector that can't be imported makes the fault missed, and the job runs."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    ran = rank.run(JOB, triggers=(rank.trigger(str(rank.folder / "absent.py"), "Kill", step=2),))
    assert ran.code == 0
    assert len(missed(ran)) == 1
    assert [failed["hook"] for failed in ran.failures] == ["orders"]


def test_nth_collective(rank: Any, source: str, phase: Any) -> None:
    """A Moment can be the second collective of a step."""
    page = rank.page()
    page.write(page.ALLOWED, 1)
    job = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://" + os.environ["FOLDER"] + "/store", rank=0, world_size=1)
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 4):
        model(torch.ones(2, 4)).sum().backward()
        for n in range(1, 4):
            dist.all_reduce(torch.ones(2)); print("reduced", step, n, flush=True)
        opt.step()
    """
    ran = rank.run(job, triggers=(rank.trigger(source, "Kill", step=2, phase=phase.COLLECTIVE, nth=2),))
    assert ran.code == -9, ran.output
    assert ran.output.splitlines()[-1] == "reduced 2 1"


def test_a_look_at_a_phase_is_cheap(agent_module: Callable[[str], Any], tmp_path: Path) -> None:
    """Triggers of later steps are not looked at in this one."""
    wire, plan = agent_module("protocol.wire"), agent_module("protocol.agent_plan")
    agent_module("protocol.control_pages").ControlPage(tmp_path / "page", create=True)
    trigger = plan.RankFault("f1", plan.Moment(0, 50, wire.Phase.BACKWARD), str(tmp_path / "page"))
    who = agent_module("agent.startup").Identity(0, 0, 1, 0, 1)
    events = wire.EventFile(tmp_path / "events.jsonl", "rank0")
    agent = agent_module("agent.agent").Agent(plan.AgentPlan("run", "", (), (trigger,)), who, events)
    agent.faults.load()
    assert agent.faults.current == []
    agent.steps_over = 49
    agent.faults.step_over()
    assert [one.planned for one in agent.faults.current] == [trigger]
