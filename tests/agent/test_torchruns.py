"""The number of a torchrun's first attempt, if a script starts several torchruns."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Script:
    """Starts torchruns one after another, each of which may leave journals of its ranks."""

    def __init__(self, folder: Path, agent_module: Callable[[str], ModuleType], patch: pytest.MonkeyPatch) -> None:
        self.folder, self.wire = folder / "events", agent_module("protocol.wire")
        self._wrap = agent_module("agent.startup")._wrap_torchrun
        self.folder.mkdir()
        agent_module("protocol.agent_plan").AgentPlan("run", str(self.folder), (), ()).write(folder / "plan.json")
        self._patch = patch
        patch.setenv(self.wire.ENV_PLAN, str(folder / "plan.json"))

    def torchrun(self, attempts: int, fails: bool, submitted: int = 0) -> int:
        """Run one with so many attempts; the number of its first attempt."""
        self._patch.setenv(self.wire.ENV_ATTEMPT_BASE, str(submitted))
        first: list[int] = []

        def launch_agent() -> None:
            first.append(int(os.environ[self.wire.ENV_ATTEMPT_BASE]))
            for number in range(first[0], first[0] + attempts):
                for rank in (0, 1):
                    (self.folder / f"rank{rank}-a{number}-p{9 + number}.jsonl").touch()
            if fails:
                raise RuntimeError("a rank failed for good")

        module: Any = SimpleNamespace(launch_agent=launch_agent)
        self._wrap(module)
        if fails:
            with pytest.raises(RuntimeError):
                module.launch_agent()
        else:
            module.launch_agent()
        return first[0]


@pytest.fixture
def script(tmp_path: Path, agent_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(tmp_path, agent_module, monkeypatch)


def test_attempts_go_on_after_those_of_a_torchrun_that_failed(script: Script) -> None:
    """The second torchrun of a shell loop counts on, also if the first had restarted its ranks."""
    failing = [script.torchrun(2, fails=True), script.torchrun(1, fails=True)]
    assert [*failing, script.torchrun(1, fails=False)] == [0, 2, 3]


def test_a_torchrun_that_never_started_a_rank_used_no_attempt(script: Script) -> None:
    """A torchrun that dies at its rendezvous leaves its number to the next one."""
    assert [script.torchrun(0, fails=True), script.torchrun(1, fails=False)] == [0, 0]


def test_a_torchrun_after_one_that_ended_well_is_another_training(script: Script) -> None:
    """`torchrun first.py && torchrun second.py` are two trainings. Their steps must not be taken for those of one that
    was resumed, so both keep the number, and the verdict is inconclusive."""
    assert [script.torchrun(1, fails=False), script.torchrun(1, fails=False)] == [0, 0]


def test_a_submission_counts_from_its_own_attempts(script: Script) -> None:
    """What ended well in an earlier submission does not matter to a loop in a later one."""
    assert script.torchrun(2, fails=False) == 0
    assert [script.torchrun(1, fails=True, submitted=2), script.torchrun(1, fails=True, submitted=2)] == [2, 3]


def test_a_torchrun_beside_another_counts_from_the_same_attempt(script: Script) -> None:
    """A torchrun that is still there, as another living process, is no earlier one."""
    other = os.getppid()
    events = script.wire.EventFile(script.folder / "torchrun-a0-p1.jsonl", "torchrun-a0-p1", None, 0)
    data = {"pid": other, "start_ticks": script.wire.start_ticks(other), "ended": False}
    events.emit(script.wire.Kind.TORCHRUN, data)
    (script.folder / "rank0-a0-p5.jsonl").touch()
    assert script.torchrun(1, fails=False) == 0


def test_a_job_is_launched_though_its_attempts_can_not_be_counted(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    """A journal that can't be read is reported, and torchrun starts its ranks all the same."""
    (script.folder / "torchrun-a0-p1.jsonl").write_text("no event\n")
    assert script.torchrun(1, fails=False) == 0
    assert "not counted" in capsys.readouterr().err
