"""Runs small scripts as a rank, exactly as the launcher would, and reads what their agent wrote.

The agent is loaded by path, so that these tests need nothing but pytest and torch: torchaos itself may be absent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

import pytest
from warm import PARENT, WarmProcess

HARNESS = Path(__file__).parents[2] / "harness"
HOOKS = ("steps", "loss", "samples", "lr", "checkpoints")


sys.modules["_torchaos"] = ModuleType("_torchaos")
sys.modules["_torchaos"].__path__ = [str(HARNESS)]
wire: Any = import_module("_torchaos.protocol.wire")
plan: Any = import_module("_torchaos.protocol.agent_plan")
pages: Any = import_module("_torchaos.protocol.control_pages")


@pytest.fixture(scope="session")
def agent_module() -> Callable[[str], ModuleType]:
    """Imports a module, such as `protocol.wire`, under the name that it has inside a rank."""
    return lambda name: import_module(f"_torchaos.{name}")


@dataclass
class Ran:
    """What a rank left."""

    code: int
    output: str
    events: list[Any]

    def of(self, *kinds: str) -> list[Any]:
        return [event for event in self.events if event.kind.value in kinds]

    @property
    def steps(self) -> list[Any]:
        return [event.data for event in self.of("step")]

    @property
    def failures(self) -> list[Any]:
        return [event.data for event in self.of("agent.failed")]


class Rank:
    """A place for the runs of one test; `run` runs a script as rank 0 of 1, attempt after attempt. With `cold`, or with
    options of the interpreter, each script gets a new interpreter, which has not imported torch. None in `env` removes
    a variable."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, 0
        self.sample_bytes: int | None = None
        self.checkpoints: str | None = None
        (folder / "events").mkdir()

    def page(self, name: str = "kill.page") -> Any:
        return pages.ControlPage(self.folder / name, create=True)

    def trigger(self, source: str | None = None, injector: str = "", page: str = "kill.page", **when: Any) -> Any:
        moment = plan.Moment(**{"pacer": 0, "step": None, "phase": None, **when})
        return plan.RankFault("f1", moment, str(self.folder / page), source, injector)

    def environment(self, hooks: tuple[str, ...], triggers: tuple[Any, ...], attempt: int) -> dict[str, str]:
        path = self.folder / "plan.json"
        plan.AgentPlan("run", str(self.folder / "events"), hooks, triggers, self.checkpoints, self.sample_bytes).write(
            path
        )
        mine = {
            "PYTHONPATH": str(HARNESS / "agent" / "bootstrap"),
            wire.ENV_PLAN: str(path),
            wire.ENV_RUN_ID: f"agent-{os.getpid()}",
            wire.ENV_ATTEMPT_BASE: "0",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "OMP_NUM_THREADS": "1",
            "FOLDER": str(self.folder),
        }
        return {**os.environ, **mine}

    def start(
        self, script: str, hooks: tuple[str, ...] = HOOKS, triggers: tuple[Any, ...] = (), attempt: int = 0,
        env: dict[str, str | None] | None = None, options: tuple[str, ...] = (), cold: bool = False,
    ) -> subprocess.Popen[str] | WarmProcess:  # fmt: skip
        file = self.folder / "script.py"
        text = textwrap.dedent(script)
        if not file.exists() or file.read_text() != text:  # another rank may be about to read it
            file.write_text(text)
        wanted = {**self.environment(hooks, triggers, attempt), **(env or {})}
        environment = {name: value for name, value in wanted.items() if value is not None}
        if not cold and not options:
            self._count += 1
            return PARENT.start(file, environment, self.folder / f"output-{self._count}.txt")
        return subprocess.Popen(
            [sys.executable, *options, str(file)], env=environment, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, script: str, **how: Any) -> Ran:
        return self.wait(self.start(script, **how))

    def wait(self, process: subprocess.Popen[str] | WarmProcess) -> Ran:
        output, _errors = process.communicate(timeout=300)
        return Ran(process.returncode or 0, output, self.read())

    def read(self) -> list[Any]:
        files = (path.read_bytes() for path in (self.folder / "events").glob("*.jsonl"))
        lines = [line for text in files for line in text.split(b"\n") if line]
        return sorted((wire.Event.from_line(line) for line in lines), key=lambda event: (event.mono_s, event.seq))


@pytest.fixture(scope="session")
def rank_in() -> Callable[[Path], Rank]:
    """Makes a place for a job that several tests share."""
    return Rank


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)
