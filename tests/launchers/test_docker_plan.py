"""Plans for containers, scenarios that are refused before anything is made, and pids that are reported from inside."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchaos.harness import registry
from torchaos.harness.fault_drivers import containers
from torchaos.harness.fault_drivers.site import OutsideSite, TargetGone
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import FIELDS, Event, Kind
from torchaos.harness.record.events.journal import read_events
from torchaos.harness.record.events.node_clocks import OuterPids
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.rollback.container_handles import Container
from torchaos.harness.running import capabilities
from torchaos.harness.running.planner import make_plan
from torchaos.harness.running.twin_key import where_else
from torchaos.harness.scenario.loader import load

SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios" / "container").glob("*.yaml"))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has everything: what is planned does not depend on where the tests run."""
    there = lambda name: capabilities.Finding(name, True, "", "")  # noqa: E731
    monkeypatch.setattr(capabilities, "check", there)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


def plan(folder: Path, fault: dict[str, Any], launcher: str = "docker", **job: Any) -> Plan:
    text = {
        "scenario": "made-up", "launcher": launcher, "assert": ["completed"],
        "faults": [{"when": {"step": 5}, "target": {"node": 1}, **fault}],
        "job": {"command": "torchrun --nnodes 2 --nproc-per-node 1 train.py", **job},
    }  # fmt: skip
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(text))
    return make_plan(load(path), path, seed=1)


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_every_scenario_of_the_library_can_be_planned(path: Path) -> None:
    """Each names what is registered, with parameters that fit."""
    found = make_plan(load(path), path, seed=0)
    assert (found.launcher, found.scenario, found.job.nodes) == ("docker", path.stem, 2)


def test_every_fault_through_the_engine_is_in_the_library() -> None:
    """No injector of this family is without a scenario."""
    used = {one.inject for path in SCENARIOS for one in load(path).faults}
    assert {name for name in registry.names("injectors") if name.startswith("container.")} == used


def test_a_container_fault_needs_containers(tmp_path: Path) -> None:
    """Under another launcher it is refused, with what to write instead."""
    with pytest.raises(UsageError, match=r"container.kill hits containers.*netns makes none; write launcher: docker"):
        plan(tmp_path, {"inject": "container.kill"}, launcher="netns")


def test_what_containers_can_not_have(tmp_path: Path) -> None:
    """The far end of a link is the engine's: it is refused, with what to write instead; other faults of links are
    planned as they stand."""
    with pytest.raises(UsageError, match=r"network.link_down can't be done.*write container.disconnect"):
        plan(tmp_path, {"inject": "network.link_down"})
    for name in ("network.partition", "network.delay", "node.reboot"):
        assert plan(tmp_path, {"inject": name}).faults[0].inject == name


def test_nodes_that_meet_in_etcd_need_one_that_they_reach(tmp_path: Path) -> None:
    """No etcd is started for containers: without an endpoint the scenario is refused, with one it is planned."""
    command = "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend etcd-v2 {} train.py"
    with pytest.raises(UsageError, match=r"scenario.yaml:10:12: .*is in etcd.*--rdzv-endpoint"):
        plan(tmp_path, {"inject": "container.kill"}, command=command.format(""))
    assert plan(tmp_path, {"inject": "container.kill"}, command=command.format("--rdzv-endpoint etcd:2379"))


def test_the_program_is_found_where_it_will_run(tmp_path: Path) -> None:
    """In an image of the user's torchrun is that of the image; on the host's own files, that of the host. What is
    mounted is relative to the scenario."""
    fault = {"inject": "container.kill"}
    own = plan(tmp_path, fault, container={"image": "mine:1", "mounts": ["data:/data:ro"]}).job
    assert own.command[0] == "torchrun"
    assert own.settings["container"] == {"image": "mine:1", "mounts": [f"{tmp_path}/data:/data:ro"]}
    assert Path(plan(tmp_path, fault).job.command[0]).is_absolute()
    with pytest.raises(UsageError, match="mounts"):
        plan(tmp_path, fault, container={"mounts": ["no-target"]})


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"launcher": "docker"}, ""),
        ({"launcher": "docker", "container": {"image": "mine:1"}}, "the job runs in an image of its own"),
        ({"launcher": "netns"}, ""),
        ({"launcher": "ssh", "hosts": ["one", "two"]}, "the job runs on other machines"),
    ],
)
def test_a_release_compares_sources_only_where_the_job_runs_those_of_this_machine(
    tmp_path: Path, job: dict[str, Any], why: str
) -> None:
    """A container of the user's image, or another machine, has files of its own."""
    assert where_else(plan(tmp_path, {"inject": "node.kill"}, **job)) == why


def events() -> list[Event]:
    """Two ranks that are each process 10 of their container."""
    seq = count()

    def one(kind: Kind, source: str, rank: int, **data: Any) -> Event:
        return Event(
            kind, source, next(seq), 0.0, 1.0 + next(seq), rank, 0, None, {**dict.fromkeys(FIELDS[kind]), **data}
        )

    return [
        event for rank, pid in ((0, 5010), (1, 6010))
        for event in (
            one(Kind.AGENT_STARTED, f"rank{rank}-a0-p10", rank, pid=10, start_ticks=7, python="", hooks=[]),
            one(Kind.RANK_UP, "harness", rank, pid=pid, start_ticks=7, inner_pid=10),
            one(Kind.RANK_EXITED, "harness", rank, pid=pid, start_ticks=7, exit_code=-9),
        )
    ]  # fmt: skip


def test_pids_from_inside_become_those_outside(tmp_path: Path) -> None:
    """What a rank says of itself is read with the pid that everybody else knows, although it comes before anybody could
    say so, and although both ranks have the same pid inside."""
    for event in events():
        with open(tmp_path / f"{event.source}.jsonl", "ab") as file:
            file.write(event.to_line())
    read = read_events(tmp_path)
    assert {(event.rank, event.data["pid"]) for event in read} == {(0, 5010), (1, 6010)}
    plan = Plan("made-up", "", 7, PlannedJob(("torchrun",), "/job", {}, 2, 2, 60.0), (), ())
    (attempt,) = Record(plan, tuple(read), {}).history.attempts
    assert {rank: (one.pid, one.exit_code) for rank, one in attempt.ranks.items()} == {0: (5010, -9), 1: (6010, -9)}


def test_pids_that_nobody_translates_stay() -> None:
    """Without a namespace, or of a process that was never seen outside, a pid is what it is; so is damage."""
    pids, (agent, up, *_) = OuterPids(), events()
    assert pids.outside(agent) is agent
    pids.note(up)
    assert pids.outside(agent).data["pid"] == 5010
    assert pids.outside(replace(agent, attempt=1)).data["pid"] == 10
    assert pids.outside(replace(agent, source="harness")).data["pid"] == 10
    assert pids.outside(replace(agent, data={"pid": ["10"]})).data["pid"] == ["10"]


def test_a_container_that_was_replaced_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back names the container that the node had; the one that it has now is not hit."""
    hit: list[str] = []
    running = {"Id": "now", "State": {"Running": True}}
    node = type("Node", (), {"index": 1, "engine": "unix:///nowhere"})()
    live: Any = type("Live", (), {"node": node, "run_id": "a-run"})()
    monkeypatch.setattr(containers, "engine", lambda where: nullcontext())
    monkeypatch.setattr(containers, "container_of", lambda client, run_id, index: running)
    monkeypatch.setattr(containers, "events", lambda *_: [])
    monkeypatch.setattr(containers, "_REPORT_S", 0.0)
    site = OutsideSite("pause", (), lambda *_: None, nodes=[live])  # type: ignore[arg-type]
    for before, wanted in (("then", []), ("now", ["now"])):
        handle = Container("unix:///nowhere", "a-run", before, "running")
        with nullcontext() if wanted else pytest.raises(TargetGone, match="node 1 has another container"):
            containers.do(replace(site, undo_on_disk=[handle]), lambda one: hit.append(one.id), "pause")
        assert hit == wanted
