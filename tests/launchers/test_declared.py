"""A launcher's declarations, and not its name, decide what a scenario may ask of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import yaml
from pydantic import Field

from torchaos.harness import registry
from torchaos.harness.gameday.fault_schedule import Round, scenario_of
from torchaos.harness.gameday.fault_schedule import load as load_day
from torchaos.harness.interfaces import Capability, Handle, JobSpec, Launcher, Node, UsageError
from torchaos.harness.record.plan import Plan
from torchaos.harness.running import capabilities
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.checks import json_schema
from torchaos.harness.scenario.loader import load


class Bare(Launcher):
    """Declares nothing beyond its name."""

    name: ClassVar[str] = "bare"

    def resources(self, spec: JobSpec) -> Sequence[Handle]:
        return ()

    def create(self, spec: JobSpec) -> Sequence[Node]:
        return ()


class Able(Bare):
    """Starts replicas, and says where they meet."""

    name: ClassVar[str] = "able"
    replicas: ClassVar[bool] = True
    sets_rendezvous: ClassVar[bool] = True


@dataclass
class Queue(Bare):
    """Has settings of its own, of which it needs one, and refuses what does not fit them."""

    partition: Annotated[str, Field(description="Where the job waits.")]
    share: Annotated[int, Field(ge=1, le=8, description="How many jobs share a machine.")] = 1

    name: ClassVar[str] = "queue"
    needs: ClassVar[frozenset[str]] = frozenset({"qtools"})
    checks: ClassVar[Mapping[str, Capability]] = {"qtools": Capability("the queue", lambda: None, "install qtools")}

    def refuses(self, injector: Any) -> str:
        return "others share the machine; write share: 1" if self.share > 1 else ""


@dataclass
class Clash(Bare):
    """Has a setting whose name the job uses already."""

    timeout: int = 1

    name: ClassVar[str] = "clash"


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both launchers, as another package would offer them, on a machine that can do everything."""
    theirs = [EntryPoint(one.name, f"{__name__}:{one.__name__}", "torchaos.launchers") for one in (Bare, Able, Queue)]
    ours = registry._entries
    monkeypatch.setattr(
        registry, "_entries", lambda group: (*ours(group), *theirs) if group == "launchers" else ours(group)
    )
    monkeypatch.setattr(capabilities, "check", lambda name: capabilities.Finding(name, True, "", ""))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    registry.find.cache_clear()
    yield
    registry.find.cache_clear()


def plan(folder: Path, fault: dict[str, Any], **job: Any) -> Plan:
    text = {
        "scenario": "it", "launcher": job.pop("launcher"), "twin": "none", "assert": ["restarts"], "faults": [fault],
        "job": {"command": "torchrun --nproc-per-node 2 train.py", **job},
    }  # fmt: skip
    path = folder / "it.yaml"
    path.write_text(yaml.safe_dump(text))
    return make_plan(load(path), path, 0)


def planned(folder: Path, fault: dict[str, Any], **job: Any) -> str:
    """The launcher of the plan."""
    return plan(folder, fault, **job).launcher


def test_replicas_need_a_launcher_that_starts_them(tmp_path: Path) -> None:
    """A launcher that declares nothing is refused, one that declares `replicas` is not."""
    fault = {"inject": "process.kill", "target": {"replica": 1, "rank": 0}, "when": {"step": 3}}
    job = {"replicas": 2, "world_size": 4}
    assert planned(tmp_path, fault, launcher="able", **job) == "able"
    with pytest.raises(UsageError, match="launcher: bare knows the ranks of one torchrun"):
        planned(tmp_path, fault, launcher="bare", **job)


def test_the_rendezvous_needs_a_placeholder_unless_the_launcher_sets_it(tmp_path: Path) -> None:
    """Without it nothing leads torchrun to the proxy."""
    fault = {"inject": "proxy.down", "with": {"endpoint": "rendezvous"}, "when": {"step": 3}, "for": "2s"}
    job = {"endpoints": {"rendezvous": "127.0.0.1:29400"}}
    assert planned(tmp_path, fault, launcher="able", **job) == "able"
    with pytest.raises(UsageError, match="the job does not use the proxy in front of rendezvous"):
        planned(tmp_path, fault, launcher="bare", **job)


KILL = {"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 3}}


def test_the_settings_of_a_launcher_are_keys_of_the_job(tmp_path: Path) -> None:
    """They are typed, have defaults, are in the plan, and an editor is told them."""
    assert plan(tmp_path, KILL, launcher="queue", partition="night").job.settings == {"partition": "night", "share": 1}
    keys = json_schema()["$defs"]["Job"]["properties"]
    assert keys["share"]["maximum"] == 8
    assert keys["partition"]["description"] == "Where the job waits."


CHECK = capabilities.check


def test_a_launcher_brings_the_capability_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lacks it is told so, with the launcher's own advice."""
    monkeypatch.setattr(capabilities, "check", CHECK)
    monkeypatch.setattr(capabilities, "CHECKS", dict(capabilities.CHECKS))
    with pytest.raises(UsageError, match=r"this machine lacks qtools \(the queue\); install qtools"):
        plan(tmp_path, KILL, launcher="queue", partition="night")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"partition": "night", "share": 9}, r"it\.yaml:\d+:\d+: share is at most 8, not 9"),
        ({"partition": [3]}, r"it\.yaml:\d+:\d+: partition is text, not a list"),
        ({"partition": "night", "shair": 2}, r"it\.yaml:\d+:\d+: unknown key 'shair'; did you mean 'share'\?"),
        ({"share": 2}, r"it\.yaml:\d+:\d+: queue needs the parameter 'partition'; add it"),
        ({"partition": "night", "share": 2}, r"it\.yaml:\d+:\d+: fault process\.kill: others share the machine; write"),
    ],
)
def test_a_wrong_setting_is_reported_with_its_place(tmp_path: Path, job: dict[str, Any], message: str) -> None:
    """As any other mistake in the file; and the launcher itself can refuse a fault."""
    with pytest.raises(UsageError, match=message):
        plan(tmp_path, KILL, launcher="queue", **job)


def test_a_plan_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """In it, four launchers had keys of their own in the job; those that are empty say nothing."""
    found = plan(tmp_path, KILL, launcher="queue", partition="night")
    raw = json.loads(found.to_json())
    del raw["job"]["settings"], raw["job"]["runs_already"]
    raw["job"] |= {"container": {}, "hosts": [], "slurm": {}, "pods": {"attach": "app=llm", "python": "python3"}}
    old = tmp_path / "plan.json"
    old.write_text(json.dumps(raw))
    job = Plan.read(old).job
    assert job.settings == {"pods": {"attach": "app=llm", "python": "python3"}}
    assert job.attached == "the pods with the label app=llm"
    old.write_text('{"pods": [')
    with pytest.raises(ValueError, match="JSON"):
        Plan.read(old)


def test_a_setting_of_another_launcher_does_no_harm(tmp_path: Path) -> None:
    """So a scenario can be tried under another launcher, with `--set launcher=...`."""
    found = plan(tmp_path, KILL, launcher="bare", partition="night", hosts=["a", "b"])
    assert (found.job.settings, found.job.nodes) == ({}, 1)


def test_a_game_day_has_them_too(tmp_path: Path) -> None:
    """Its rounds are scenarios with the same job."""
    path = tmp_path / "day.yaml"
    job = {"command": "torchrun --nproc-per-node 2 {day}/train.py", "partition": "night", "share": 2}
    faults = [{"inject": "process.kill", "target": {"rank": 1}}]
    day = {"gameday": "it", "launcher": "queue", "job": job, "faults": faults}
    path.write_text(yaml.safe_dump({**day, "duration": "1h", "arrivals": {"every": "10m"}}))
    found = load_day(path, (), lambda day, tell: None)
    assert found.job.settings["share"] == 2
    assert scenario_of(found, Round(0, 0.0, 1.0, ()), tmp_path, tmp_path)["job"]["partition"] == "night"


def test_two_settings_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher can't give another meaning to a key that the job has already."""
    before = registry._entries
    clash = EntryPoint("clash", f"{__name__}:Clash", "torchaos.launchers")
    monkeypatch.setattr(registry, "_entries", lambda of: (*before(of), clash) if of == "launchers" else before(of))
    with pytest.raises(UsageError, match="launcher 'clash': job has another key 'timeout'; rename the parameter"):
        plan(tmp_path, KILL, launcher="queue", partition="night")
