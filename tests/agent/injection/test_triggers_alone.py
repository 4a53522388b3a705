"""Tests when a trigger fires, without a rank: with a stand-in for the rank's agent and its own clock. For triggers in a
real rank see test_triggers.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FIRED = ["fault.applying", "fault.applied"]


class Clock:
    """Time that passes only while a rank waits. `at`: what the harness does meanwhile, by time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: dict[float, Callable[[], object]] = {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for time in [time for time in self.at if time <= self.now]:
            self.at.pop(time)()


@dataclass
class Fault:
    """An injector that remembers where it was applied."""

    sites: list[Any] = field(default_factory=list)

    def apply(self, site: Any) -> None:
        self.sites.append(site)


class Bench:
    """A rank with some triggers, of which each has a control page and, if it is not from outside, a fault."""

    def __init__(self, folder: Path, module: Callable[[str], Any], clock: Clock) -> None:
        self.folder, self.module, self.clock = folder, module, clock
        self.phase, self.page_type = module("protocol.wire").Phase, module("protocol.control_pages").ControlPage
        self.faults: dict[str, Fault] = {}
        self.told: list[tuple[str, Any]] = []
        self.failed: list[str] = []
        self.lasted = 0

    def page(self, name: str, **words: int) -> Any:
        page = self.page_type(self.folder / name, create=True)
        for word, value in {"ALLOWED": 1, **words}.items():
            page.write(getattr(page, word), value)
        return page

    def trigger(self, name: str = "f1", outside: bool = False, **when: Any) -> Any:
        plan = self.module("protocol.agent_plan")
        moment = plan.Moment(**{"pacer": 1, "step": None, "phase": None, **when})
        return plan.RankFault(name, moment, str(self.folder / name), None if outside else "faults.py", name, {}, 50.0)

    def triggers(self, *triggers: Any, rank: int = 1, attempt: int = 0) -> Any:
        """The triggers of a rank that has just started, with the faults at hand."""
        agent = SimpleNamespace(
            who=SimpleNamespace(rank=rank, attempt=attempt), plan=SimpleNamespace(faults=triggers), steps_over=0,
            careful=lambda _hook: lambda call: call, fail=lambda hook, _error: self.failed.append(hook),
            emit=lambda kind, data: self.told.append((kind.value, data)),
            lasting=SimpleNamespace(on_steps=[], step_over=self._lasts),
        )  # fmt: skip
        found = self.module("agent.injection.rank_faults").RankFaults(agent)
        found.agent = agent
        found.load()
        return found

    def step(self, triggers: Any, *phases: Any) -> None:
        """One step of the training, with these phases in it."""
        for phase in phases:
            triggers.enter(phase)
        triggers.agent.steps_over += 1
        triggers.step_over()

    def sites(self, name: str = "f1") -> list[Any]:
        return self.faults[name].sites if name in self.faults else []

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _data in self.told]

    @property
    def missed(self) -> list[str]:
        return [data["reason"] for kind, data in self.told if kind == "fault.missed"]

    def _lasts(self) -> None:
        self.lasted += 1


@pytest.fixture
def bench(
    tmp_path: Path, agent_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:  # fmt: skip
    clock, triggers = Clock(), agent_module("agent.injection.rank_faults")
    found = Bench(tmp_path, agent_module, clock)
    monkeypatch.setattr(triggers, "time", clock)
    monkeypatch.setattr(agent_module("protocol.control_pages"), "time", clock)
    monkeypatch.setattr(
        triggers.rank_site, "load", lambda _source, name, _params: found.faults.setdefault(name, Fault())
    )  # fmt: skip
    yield found
    assert found.failed == []


def test_the_start_of_a_step(bench: Bench) -> None:
    """A trigger of step 3 without a phase fires when step 2 is over, once, and says so before and after."""
    page = bench.page("f1")
    triggers = bench.triggers(bench.trigger(step=3))
    bench.step(triggers)
    assert bench.told == []
    bench.step(triggers)
    bench.step(triggers)
    about = {"fault": "f1", "phase": None, "global_step": 3, "pid": os.getpid()}
    assert bench.told == [("fault.applying", about), ("fault.applied", {"fault": "f1"})]
    (site,) = bench.sites()
    assert (site.fault, site.step, site.phase, site.pids) == ("f1", 3, None, [os.getpid()])
    assert (site.lease.control, site.lease.number) == (str(bench.folder / "f1"), 1)
    assert 0 < site.lease.left_s <= 50
    assert (page.read(page.FIRED), page.read(page.STATE)) == (1, 2)
    assert (triggers.current, bench.clock.now) == ([], 0)


def test_the_first_step_begins_with_its_first_phase(bench: Bench) -> None:
    """Nothing is over before step 1, so a trigger of step 1 fires in the first phase, and not when the process
    starts or loads a checkpoint."""
    bench.page("f1")
    triggers = bench.triggers(bench.trigger(step=1))
    for phase in (bench.phase.START, bench.phase.CHECKPOINT_LOAD, bench.phase.CHECKPOINT_WRITE):
        triggers.enter(phase)
    assert bench.told == []
    triggers.enter(bench.phase.DATA)
    assert [site.phase for site in bench.sites()] == [bench.phase.DATA]
    assert bench.told[0][1]["phase"] == "data"


@pytest.mark.parametrize(("nth", "fires_at"), [(1, [3]), (2, [4]), (3, [])])
def test_the_nth_time_in_a_step(bench: Bench, nth: int, fires_at: list[int]) -> None:
    """Only the phase of that step counts, each step anew, and the trigger fires exactly at the nth time. If the step
    has fewer, the trigger is missed, and the reason counts them."""
    bench.page("f1")
    triggers, backward = bench.triggers(bench.trigger(step=2, phase=bench.phase.BACKWARD, nth=nth)), 0
    fired: list[int] = []
    for _step in range(3):
        for phase in (bench.phase.FORWARD, bench.phase.BACKWARD, bench.phase.BACKWARD):
            backward += phase is bench.phase.BACKWARD
            triggers.enter(phase)
            fired += [backward] * (len(bench.sites()) - len(fired))
        bench.step(triggers)
    assert fired == fires_at
    assert bench.missed == (
        [] if fires_at else ["in step 2 the phase backward was entered 2 times, and the Moment is at time 3"]
    )


def test_without_a_step_it_fires_at_the_first_chance(bench: Bench) -> None:
    """From the nth time on, as soon as the harness has armed it for this process, and as often as it may."""
    page = bench.page("f1", ALLOWED=2, ARMED_PID=os.getpid() + 1)
    triggers = bench.triggers(bench.trigger(phase=bench.phase.BACKWARD, nth=2))
    counts = []
    for time in range(6):
        if time == 3:
            page.write(page.ARMED_PID, os.getpid())
        bench.step(triggers, bench.phase.BACKWARD)
        counts.append(len(bench.sites()))
    assert counts == [0, 0, 0, 1, 2, 2]
    assert (bench.missed, bench.clock.now) == ([], 0)
    early = bench.triggers(bench.trigger(phase=bench.phase.BACKWARD, nth=2))
    page.write(page.ALLOWED, 9)
    early.enter(bench.phase.BACKWARD)
    assert len(bench.sites()) == 2


def test_without_step_and_phase_any_phase_will_do(bench: Bench) -> None:
    """Also that of a checkpoint; only the start of the process is too early."""
    for name in ("f1", "f2"):
        bench.page(name)
    triggers = bench.triggers(bench.trigger("f1"))
    triggers.enter(bench.phase.START)
    assert bench.told == []
    triggers.enter(bench.phase.CHECKPOINT_WRITE)
    assert bench.kinds == FIRED
    again = bench.triggers(bench.trigger("f2"))
    bench.step(again)
    assert bench.kinds == FIRED, "a step that is over is no phase"


def test_a_rank_and_attempt_of_its_own(bench: Bench) -> None:
    """A trigger is for one rank, and for one attempt or for all."""
    bench.page("f1")
    for rank, attempt, wanted, is_mine in ((1, 0, None, True), (0, 0, None, False), (1, 2, 2, True), (1, 1, 2, False)):
        triggers = bench.triggers(bench.trigger(step=1, attempt=wanted), rank=rank, attempt=attempt)
        assert (len(triggers.mine), len(triggers.current)) == (is_mine, is_mine)


@pytest.mark.parametrize(
    ("words", "fires"),
    [
        ({}, True),
        ({"FIRED": 1}, False),
        ({"FIRED": 1, "ALLOWED": 2}, True),
        ({"FIRED": 2, "ALLOWED": 1}, False),
        ({"GO": 1}, False),
        ({"FIRED": 1, "GO": 1, "ALLOWED": 2}, True),
        ({"ARMED_PID": -1}, False),
        ({"ARMED_PID": os.getpid()}, True),
    ],
    ids=["new", "fired", "once more", "too often", "died held", "was held", "called off", "armed for it"],
)
def test_what_the_page_says(bench: Bench, words: dict[str, int], fires: bool) -> None:
    """A restarted rank does not fire what has fired, or what it was let go for when it died, or what was called off;
    and it does not wait for these."""
    bench.page("f1", **words)
    bench.step(bench.triggers(bench.trigger(step=2)))
    assert (len(bench.sites()), bench.missed, bench.clock.now) == (fires, [], 0)


def test_a_moment_waits_for_the_harness(bench: Bench) -> None:
    """It fires when the harness has armed it, is missed if that takes longer than the rank may wait, and costs nothing
    more when it is called off meanwhile."""
    page = bench.page("f1", ALLOWED=0)
    bench.clock.at[2.0] = lambda: page.write(page.ALLOWED, 1)
    bench.step(bench.triggers(bench.trigger(step=2, hold_s=5.0)))
    assert (bench.kinds, round(bench.clock.now, 1)) == (FIRED, 2.0)
    late = bench.page("f2", ALLOWED=0)
    bench.step(bench.triggers(bench.trigger("f2", step=2, hold_s=5.0)))
    assert bench.missed == ["not armed in time: the rank reached the moment of the fault and waited as long as it may"]
    assert (late.read(late.STATE), late.read(late.FIRED), round(bench.clock.now, 1)) == (4, 0, 7.0)
    off = bench.page("f3", ALLOWED=0)
    bench.clock.at[8.0] = lambda: off.write(off.ARMED_PID, off.CALLED_OFF)
    triggers = bench.triggers(bench.trigger("f3", step=2, hold_s=5.0))
    bench.step(triggers)
    assert (bench.sites("f3"), len(bench.missed), triggers.current, round(bench.clock.now, 1)) == ([], 1, [], 8.0)


def test_a_long_wait_costs_few_looks(bench: Bench) -> None:
    """A rank that is held for a minute looks at its page at most fifty times a second, and is at most 20 ms late."""
    looks: list[float] = []

    def is_over() -> bool:
        looks.append(bench.clock.now)
        return bench.clock.now >= 60.0

    bench.module("protocol.control_pages").wait_until(is_over, 100.0)
    assert 60.0 <= bench.clock.now <= 60.02
    assert 50 * 60 <= len(looks) <= 50 * 60 + 400


def test_at_the_start_of_the_process_it_waits_too(bench: Bench) -> None:
    """The start comes only once, so the rank waits there for the word, although the trigger names no step."""
    page = bench.page("f1", ALLOWED=0)
    bench.clock.at[1.0] = lambda: page.write(page.ALLOWED, 1)
    bench.triggers(bench.trigger(phase=bench.phase.START, hold_s=5.0)).enter(bench.phase.START)
    assert (bench.kinds, round(bench.clock.now, 1)) == (FIRED, 1.0)


@pytest.mark.parametrize(("fired", "go", "state", "waited"), [(0, 1, 3, 2.0), (1, 2, 3, 2.0), (1, 1, 4, 5.0)])
def test_a_hold(bench: Bench, fired: int, go: int, state: int, waited: float) -> None:
    """A fault from outside holds the rank until the harness lets this firing go, and no longer than it may."""
    page = bench.page("f1", ALLOWED=2, FIRED=fired, GO=fired)
    bench.clock.at[2.0] = lambda: page.write(page.GO, go)
    seen = []
    bench.clock.at[1.0] = lambda: seen.append(page.read(page.STATE))
    bench.step(bench.triggers(bench.trigger(outside=True, step=2, hold_s=5.0)))
    assert bench.told[0] == ("fault.held", {"fault": "f1", "phase": None, "global_step": 2})
    assert (page.read(page.FIRED), page.read(page.STATE)) == (fired + 1, state)
    assert (seen, round(bench.clock.now, 1)) == ([1], waited)
    assert bench.missed == ([] if state == 3 else ["the time to hold the rank was over: the rank went on by itself"])
    assert bench.kinds[1:] == ["fault.missed"] * len(bench.missed)


def test_the_phase_of_a_hold_is_told(bench: Bench) -> None:
    """In the event, by its name."""
    page = bench.page("f1")
    bench.clock.at[0.1] = lambda: page.write(page.GO, 1)
    bench.triggers(bench.trigger(outside=True, step=1, phase=bench.phase.OPTIMIZER)).enter(bench.phase.OPTIMIZER)
    assert bench.told == [("fault.held", {"fault": "f1", "phase": "optimizer", "global_step": 1})]


def test_after_a_load_the_harness_knows_the_step(bench: Bench) -> None:
    """Before its first step a rank that loaded does not know its place. When that step is over it asks, once, and
    counts on from there."""
    page = bench.page("f1")
    triggers = bench.triggers(bench.trigger(step=13, hold_s=5.0), attempt=1)
    triggers.loaded()
    assert (triggers.base, triggers.step, triggers.current) == (None, None, [])

    def answer() -> None:
        page.write(page.BASE, 10)
        page.write(page.BASE_ATTEMPT, 1)

    bench.clock.at[1.0] = answer
    bench.step(triggers)
    assert (triggers.step, bench.told, round(bench.clock.now, 1)) == (12, [], 1.0)
    bench.step(triggers)
    assert (bench.kinds, bench.sites()[0].step, round(bench.clock.now, 1)) == (FIRED, 13, 1.0)


def test_a_base_that_nobody_tells(bench: Bench) -> None:
    """Each trigger that names a step is missed after its own wait; the answer to another attempt is none."""
    for name in ("f1", "f2"):
        page = bench.page(name, BASE=10, BASE_ATTEMPT=0)
    triggers = bench.triggers(
        bench.trigger("f1", step=13, hold_s=5.0), bench.trigger("f2", step=14, hold_s=3.0), attempt=1
    )  # fmt: skip
    triggers.loaded()
    bench.step(triggers)
    assert (
        bench.missed
        == ["a checkpoint was loaded, and the harness did not find out with which step this attempt began"] * 2
    )
    assert (page.read(page.STATE), round(bench.clock.now, 1)) == (4, 8.0)


def test_a_load_matters_only_for_a_numbered_step_to_come(bench: Bench) -> None:
    """Without such a trigger, or when it has fired, nobody needs to know the step."""
    bench.page("f1")
    bench.page("f2", FIRED=1)
    triggers = bench.triggers(bench.trigger("f1", phase=bench.phase.BACKWARD), bench.trigger("f2", step=9))
    triggers.loaded()
    assert triggers.base == 0
    bench.step(triggers, bench.phase.BACKWARD)
    assert (bench.kinds, bench.clock.now) == (FIRED, 0)


class Optimizer:
    """With a step counter of its own, or without one."""

    def __init__(self, step: int | None) -> None:
        self.count(step)

    def count(self, step: int | None) -> None:
        self.state: dict[str, Any] = {} if step is None else {"weight": {"step": step}}


def _put_back(triggers: Any, *pairs: tuple[Optimizer, int | None]) -> None:
    triggers.loaded()
    for optimizer, step in pairs:
        triggers.puts_back(optimizer)
        optimizer.count(step)
        triggers.was_put_back(optimizer)


def test_a_rollback_within_the_process_counts_again(bench: Bench) -> None:
    """The optimizers' own counters say by how many steps the job went back: once for all of them, and once more at the
    next place. A trigger of a step that comes again fires in it."""
    bench.page("f1")
    triggers, pair = bench.triggers(bench.trigger(step=6)), (Optimizer(0), Optimizer(0))

    def train(steps: int) -> None:
        for _ in range(steps):
            for one in pair:
                one.count(one.state["weight"]["step"] + 1)
            bench.step(triggers)

    train(3)
    _put_back(triggers, (pair[0], 1), (pair[1], 1))
    assert (triggers.step, bench.told) == (2, [])
    train(1)
    assert triggers.step == 3
    _put_back(triggers, (pair[0], 1), (pair[1], 1))
    assert triggers.step == 2
    train(3)
    assert bench.told == []
    train(1)
    assert (bench.kinds, bench.sites()[0].step) == (FIRED, 6)


def test_an_optimizer_without_a_counter_says_nothing_of_a_rollback(bench: Bench) -> None:
    """Such as Muon beside AdamW, whose counter says by how many steps the job went back."""
    bench.page("f1")
    triggers, muon, adam = bench.triggers(bench.trigger(step=6)), Optimizer(None), Optimizer(0)
    for _ in range(3):
        adam.count(adam.state["weight"]["step"] + 1)
        bench.step(triggers)
    _put_back(triggers, (muon, None), (adam, 1))
    assert (triggers.step, bench.missed) == (2, [])


def test_a_rollback_that_no_counter_tells_of(bench: Bench) -> None:
    """The triggers that name a step are missed, and the reason says after how many steps; those without one stay."""
    bench.page("f1")
    bench.page("f2")
    triggers = bench.triggers(bench.trigger("f1", step=6), bench.trigger("f2", phase=bench.phase.BACKWARD))
    bench.step(triggers)
    bench.step(triggers)
    _put_back(triggers, (Optimizer(2), 1), (Optimizer(5), 1))
    assert bench.missed == []
    bench.step(triggers, bench.phase.BACKWARD)
    assert len(bench.missed) == 1
    assert bench.missed[0].startswith("after 2 steps of this attempt the job loaded a checkpoint and went on from it")
    assert len(bench.sites("f2")) == 1


def test_a_state_without_a_load_is_no_rollback(bench: Bench) -> None:
    """Nor is what an optimizer loads before the first step, when the checkpoint says the step."""
    bench.page("f1")
    triggers, optimizer = bench.triggers(bench.trigger(step=4)), Optimizer(7)
    triggers.puts_back(optimizer)
    triggers.was_put_back(optimizer)
    bench.step(triggers)
    triggers.puts_back(optimizer)
    optimizer.count(2)
    triggers.was_put_back(optimizer)
    assert (triggers.step, bench.missed) == (2, [])


def test_what_is_past_is_missed(bench: Bench) -> None:
    """A trigger of a step that was over before it was known is missed; a trigger that has fired is forgotten."""
    bench.page("f1", BASE=10, BASE_ATTEMPT=0)
    bench.page("f2", FIRED=1)
    bench.page("f3", BASE=10, BASE_ATTEMPT=0)
    triggers = bench.triggers(
        bench.trigger("f1", step=3), bench.trigger("f2", step=4),
        bench.trigger("f3", step=10, phase=bench.phase.BACKWARD),
    )  # fmt: skip
    triggers.loaded()
    bench.step(triggers)
    assert bench.missed == [f"step {step} was over before the trigger could be established" for step in (3, 10)]


def test_collectives_of_a_kind(bench: Bench) -> None:
    """Only collectives that the trigger names count for `nth`; the event says which collective it was."""
    plan = bench.module("protocol.agent_plan")
    for name in ("f1", "f2"):
        bench.page(name)
    calls = [
        SimpleNamespace(
            matches=lambda wanted, op=op: wanted.operation == op, event_data=lambda op=op: {"operation": op}
        )
        for op in ("barrier", "all_reduce", "barrier", "all_reduce")
    ]
    which, phase = plan.Collectives("all_reduce"), bench.phase.COLLECTIVE
    triggers = bench.triggers(
        bench.trigger("f1", step=1, phase=phase, nth=2, collectives=which),
        bench.trigger("f2", step=1, phase=phase, nth=3, collectives=which),
    )
    counts = []
    for call in calls:
        triggers.enter(phase, call)
        counts.append(len(bench.sites()))
    assert (counts, bench.told[0][1]["collective"]) == ([0, 0, 0, 1], {"operation": "all_reduce"})
    assert bench.sites()[0].call is calls[3]
    bench.step(triggers)
    times = "was entered by a collective of that kind 2 times, and the Moment is at time 3"
    assert bench.missed == [f"in step 1 the phase collective {times}"]


def test_which_phases_are_expected(bench: Bench) -> None:
    """Those of the triggers that may fire in the current step, so that hooks do their costly work only then."""
    bench.page("f1")
    triggers = bench.triggers(bench.trigger(step=2, phase=bench.phase.CHECKPOINT_WRITTEN))
    assert not triggers.expects(bench.phase.CHECKPOINT_WRITTEN)
    bench.step(triggers)
    assert triggers.expects(bench.phase.CHECKPOINT_WRITTEN)
    assert not triggers.expects(bench.phase.BACKWARD)


def test_an_order_that_can_not_be_loaded(bench: Bench) -> None:
    """It is missed, with the error, and the other triggers stay."""
    bench.page("f2")
    triggers = bench.triggers(bench.trigger("f1", step=2), bench.trigger("f2", step=2))
    assert bench.failed == ["orders"]
    bench.failed.clear()
    assert bench.missed[0].startswith("the agent could not load it: FileNotFoundError(")
    bench.step(triggers)
    assert len(bench.sites("f2")) == 1


def test_faults_that_last_act_after_each_step(bench: Bench) -> None:
    """Also when no order is left; and nothing is called if no fault lasts."""
    triggers = bench.triggers()
    bench.step(triggers)
    assert bench.lasted == 0
    triggers.agent.lasting.on_steps.append(1)
    bench.step(triggers)
    assert bench.lasted == 1
