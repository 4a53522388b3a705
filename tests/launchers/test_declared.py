"""A launcher's declarations, and not its name, decide what a scenario may ask of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from torchaos.harness import registry
from torchaos.harness.interfaces import Handle, JobSpec, Launcher, Node, UsageError
from torchaos.harness.registry import offers
from torchaos.harness.running import capabilities
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario import load


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


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both launchers, as another package would offer them, on a machine that can do everything."""
    theirs = [EntryPoint(one.name, f"{__name__}:{one.__name__}", "torchaos.launchers") for one in (Bare, Able)]
    ours = offers._entries
    monkeypatch.setattr(
        offers, "_entries", lambda group: (*ours(group), *theirs) if group == "launchers" else ours(group)
    )
    monkeypatch.setattr(capabilities, "check", lambda name: capabilities.Finding(name, True, "", ""))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    registry.find.cache_clear()
    yield
    registry.find.cache_clear()


def planned(folder: Path, fault: dict[str, Any], **job: Any) -> str:
    """The launcher of the plan."""
    text = {
        "scenario": "it", "launcher": job.pop("launcher"), "twin": "none", "assert": ["restarts"], "faults": [fault],
        "job": {"command": "torchrun --nproc-per-node 2 train.py", **job},
    }  # fmt: skip
    path = folder / "it.yaml"
    path.write_text(yaml.safe_dump(text))
    return make_plan(load(path), path, 0).launcher


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
