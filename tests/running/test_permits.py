"""Blast radius, consent and scope: they are checked when a plan is made, and again before a fault lands."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from torchaos.harness import registry
from torchaos.harness.base_classes import Fault
from torchaos.harness.interfaces import Irreversible, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Phase
from torchaos.harness.record.plan import Plan
from torchaos.harness.rollback.file_handles import File, Touches
from torchaos.harness.rollback.handles import JobProcesses, PageSlot, Process
from torchaos.harness.rollback.network_handles import LinkUp
from torchaos.harness.running.fault_checks import NotPermitted, Permits, beyond, check_network
from torchaos.harness.running.planner import make_plan
from torchaos.harness.running.planner.fault_plans import _DRAWN_PHASES
from torchaos.harness.scenario.loader import load

Planned = Callable[..., Plan]
KILL = {"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 3}}
FREEZE = {"inject": "process.freeze", "target": {"rank": 1}, "when": {"step": 3}}


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    """The plan of a job of 8 ranks on 2 nodes with one fault and these limits."""

    def plan(fault: dict[str, Any], limits: dict[str, Any] | None = None, given: Any = (), **more: Any) -> Plan:
        scenario = {
            "scenario": "limits",
            "job": {"command": "torchrun --nproc-per-node 4 --nnodes 2 train.py"},
            "faults": [fault],
            "assert": ["completed"],
            "limits": limits or {},
            **more,
        }
        path = tmp_path / "limits.yaml"
        path.write_text(yaml.safe_dump(scenario))
        return make_plan(load(path), path, more.get("seed", 0), consent=given)

    return plan


@pytest.mark.parametrize(
    ("target", "limits", "says"),
    [
        ({"ranks": [0, 1]}, {"ranks": 1}, "hit 2 ranks, and limits.ranks allows 1"),
        ({"percent": 50}, {"percent": 25}, r"hit 4 of 8 ranks, and limits.percent 25 allows 2"),
        ({"rank": 3}, {"never": {"ranks": [3]}}, "rank 3 is on the list of limits.never"),
        ({"rank": 5}, {"never": {"nodes": [1]}}, "node 1 is on the list of limits.never"),
        ("all", {"never": {"ranks": [0]}}, "rank 0 is on the list"),
        ({"count": 3}, {"never": {"ranks": [0, 1, 2, 3, 4, 5]}}, "needs 3 ranks; the job has 8.*limits.never: 2"),
        ({"node": "any"}, {"never": {"nodes": [0, 1]}}, "leaves no rank to draw from"),
    ],
)  # fmt: skip
def test_a_plan_beyond_its_limits_is_refused(planned: Planned, target: Any, limits: Any, says: str) -> None:
    """Too many ranks, too large a share, or a target that is never to be hit: bad usage, and the text says which."""
    with pytest.raises(UsageError, match=says):
        planned({**KILL, "target": target}, limits)


def test_what_is_drawn_spares_the_never_list(planned: Planned) -> None:
    """Whatever the seed, a target that is drawn is none of those."""
    limits = {"never": {"ranks": [0, 2], "nodes": [1]}}
    fault = {**KILL, "target": {"rank": "any"}}
    drawn = {planned(fault, limits, seed=seed).faults[0].target.ranks for seed in range(30)}
    assert drawn == {(1,), (3,)}


def test_any_phase_is_drawn(planned: Planned) -> None:
    """By the seed, of the phases of each step; a phase that is named is that one."""
    fault = {**KILL, "when": {"step": 3, "phase": "any"}}
    triggers = [planned(fault, seed=seed).faults[0].trigger for seed in range(30)]
    assert {one.phase for one in triggers if isinstance(one, Moment)} == set(_DRAWN_PHASES)
    named = planned({**KILL, "when": {"step": 3, "phase": "backward"}}).faults[0].trigger
    assert named == Moment(1, 3, Phase.BACKWARD)


def test_a_trigger_decides_from_where_a_fault_is_applied(planned: Planned) -> None:
    """At a step by the agent in the rank, in a collective of the kind that is named; after a time from outside."""
    at_step = planned(KILL).faults[0]
    assert (at_step.where, planned({**KILL, "when": {"time": "2s"}}).faults[0].where) == ("rank", "node")
    trigger = planned({**KILL, "when": {"step": 3, "operation": "all_reduce"}}).faults[0].trigger
    assert isinstance(trigger, Moment)
    assert (trigger.phase, trigger.step) == (Phase.COLLECTIVE, 3)
    assert trigger.collectives is not None
    assert trigger.collectives.operation == "all_reduce"


def test_no_fault_lasts_longer_than_the_limit(planned: Planned) -> None:
    """`for` beyond limits.duration is refused; a fault that says nothing is taken back after that time."""
    with pytest.raises(UsageError, match=r"lasts 60 s, and limits\.duration allows 5 s"):
        planned({**FREEZE, "for": "60s"}, {"duration": "5s"})
    assert planned(FREEZE, {"duration": "5s"}).faults[0].duration_s == 5.0
    assert planned({**FREEZE, "for": "2s"}, {"duration": "5s"}).faults[0].duration_s == 2.0
    assert planned(KILL, {"duration": "5s"}).faults[0].duration_s is None


def test_limits_survive_the_plan_file(planned: Planned, tmp_path: Path) -> None:
    """A plan that is read back has the same limits."""
    plan = planned(KILL, {"ranks": 2, "percent": 50, "duration": "5s", "never": {"ranks": [0]}})
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600


@dataclass(frozen=True)
class HurtsTheHost(Fault):
    """A fault that needs consent."""

    name: ClassVar[str] = "host.hurt"
    where: ClassVar[Any] = ("node",)
    needs: ClassVar[frozenset[str]] = frozenset()
    consent: ClassVar[str] = "kmsg"

    def changes(self, site: Any) -> Irreversible:
        return Irreversible("it can't")


@pytest.mark.parametrize(
    ("scenario", "given", "says"),
    [
        ([], [], r"`consent: \[kmsg\]` in the scenario and --consent kmsg on the command line"),
        (["kmsg"], [], "write --consent kmsg on the command line$"),
        ([], ["kmsg"], r"write `consent: \[kmsg\]` in the scenario$"),
        (["clock"], ["kmsg"], "in the scenario$"),
        (["kmsg"], ["kmsg", "kmesg"], r"--consent kmesg: no fault asks for that; did you mean 'kmsg'\?"),
        ([], ["foo"], "--consent foo: no fault asks for that; there are dcgm, kmsg"),
    ],
)
def test_what_can_hurt_the_host_needs_two_consents(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, scenario: list[str], given: list[str], says: str
) -> None:
    """With one of the two missing the plan is refused with one sentence; with both it is made."""
    find = registry.find

    def with_ours(group: str, name: str) -> Any:
        return HurtsTheHost if name == "host.hurt" else find(group, name)

    monkeypatch.setattr(registry, "find", with_ours)
    fault = {**KILL, "inject": "host.hurt"}
    with pytest.raises(UsageError, match=says):
        planned(fault, given=given, **({"consent": scenario} if scenario else {}))
    assert planned(fault, given=["kmsg"], consent=["kmsg"]).consent == ("kmsg",)


def test_counts_what_is_hit_by_all_faults_together(planned: Planned) -> None:
    """Two faults at two ranks each stay below a limit of three only as long as they overlap."""
    plan = planned({**KILL, "target": {"ranks": [0, 1]}}, {"ranks": 3})
    permits = Permits(plan, "run", (), dict, lambda: 8)
    permits.check([0, 1], [])
    permits.check([1, 2], [])
    with pytest.raises(NotPermitted, match="hit 4 ranks"):
        permits.check([3], [])
    permits.check([0], [])  # those that were hit already may be hit again


def test_a_job_that_came_back_smaller_is_hit_no_more(planned: Planned) -> None:
    """The share counts of the ranks that there are now: what was 25 percent of 8 ranks is 50 of 4."""
    plan = planned({**KILL, "target": {"count": 2}}, {"percent": 25})
    assert beyond(plan, [0, 1], [], 8) is None
    size = [8]
    permits = Permits(plan, "run", (), dict, lambda: size[0])
    permits.check([0, 1], [])
    size[0] = 4
    with pytest.raises(NotPermitted, match="2 of 4 ranks"):
        permits.check([0, 1], [])


def test_a_rank_counts_for_its_node(planned: Planned) -> None:
    """With four ranks on a node, rank 3 is on node 0 and rank 4 on node 1; with one on each, rank 1 is."""
    plan = planned(KILL, {"never": {"nodes": [1]}})
    assert [rank for rank in range(8) if beyond(plan, [rank], [], 8)] == [4, 5, 6, 7]
    assert [rank for rank in range(2) if beyond(plan, [rank], [], 2)] == [1]
    spread = planned({**KILL, "target": {"rank": 0}}, {"nodes": 1})
    assert beyond(spread, [], [0, 1], 8) == "the faults hit 2 nodes, and limits.nodes allows 1"


def test_touches_nothing_that_is_not_the_jobs(planned: Planned, tmp_path: Path) -> None:
    """A stranger's process, another run, a file elsewhere or behind a link: refused; the job's own: permitted."""
    inside, outside = tmp_path / "run", tmp_path / "home"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "data").write_text("x")
    (inside / "link").symlink_to(outside)
    me = Process.of(os.getpid(), "resume")
    permits = Permits(planned(KILL), "run-1", [inside], lambda: {me.pid: me.start_ticks}, lambda: 8)
    copies = inside
    permits.check_changes([me, File.of(inside / "data", inside, copies), JobProcesses("run-1.probes")])
    stranger = replace(me, pid=me.pid + 1)
    for handle, says in (
        (stranger, "not one of the job's"),
        (replace(me, start_ticks=me.start_ticks + 1), "not one of the job's"),
        (JobProcesses("run-2"), "another run"),
        (File.of(outside / "data", outside, copies), "so it is not touched"),
        (File.of(inside / "data", inside, outside), "outside the run directory"),
        (PageSlot(str(inside / "link" / "data")), "so it is not touched"),
        (LinkUp(me.pid, me.start_ticks, "eth0"), "network of the whole host"),
    ):
        with pytest.raises(NotPermitted, match=says):
            permits.check_changes([handle])


def test_a_handle_that_does_not_say_what_it_touches_is_refused(planned: Planned, tmp_path: Path) -> None:
    """A new kind of handle is not permitted by default: neither without a declaration, nor with an empty one."""

    @dataclass(frozen=True)
    class Silent:
        kind = "silent"

    class Empty(Silent):
        def touches(self) -> Touches:
            return Touches()

    permits = Permits(planned(KILL), "run-1", [tmp_path], dict, lambda: 8)
    for handle in (Silent(), Empty()):
        with pytest.raises(NotPermitted, match="does not declare what it touches"):
            permits.check_changes([handle])  # type: ignore[list-item]


def test_the_hosts_network_needs_consent() -> None:
    """The namespace that this process is in counts as the host's."""
    with pytest.raises(NotPermitted, match="host-network"):
        check_network(Path("/proc/self/ns/net"), ())
    check_network(Path("/proc/self/ns/net"), ["host-network"])
    with pytest.raises(NotPermitted, match="can't be identified"):
        check_network(Path("/proc/self/ns/none"), ["host-network"])
