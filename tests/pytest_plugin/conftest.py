"""Projects that use the plugin, and pytest run in them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recorded import RECORDED

STAND_IN = Path(__file__).with_name("stand_in.py")


@dataclass(frozen=True)
class Done:
    code: int
    text: str
    folder: Path

    def counts(self) -> dict[str, int]:
        """Of the last line: {"passed": 3, "inconclusive": 1}."""
        found = re.findall(r"(\d+) (passed|failed|inconclusive|errors?|deselected|skipped)", self.text.splitlines()[-1])
        return {what.removesuffix("s") if what == "errors" else what: int(count) for count, what in found}

    def calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.text}"


class Project:
    """A folder with its own pytest.ini; scenarios run by a stand-in for the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
        # With these alone, and not all that the environment has: quicker, and nobody else's affair.
        self.env |= {"COLUMNS": "120", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        self.plugins = ["torchaos.harness.pytest_plugin"]
        self.file("pytest.ini", f"[pytest]\ntorchaos_command = {shlex.join([sys.executable, str(STAND_IN)])}\n")

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def scenario(self, name: str) -> Path:
        text = (RECORDED / "scenario.yaml").read_text()
        return self.file(f"{name}.yaml", re.sub("^scenario: .*", f"scenario: {Path(name).name}", text, flags=re.M))

    def call(self) -> Any:
        """The first call of the stand-in, or None."""
        path = self.folder / "calls"
        text = path.read_text() if path.exists() else ""
        return json.loads(text.partition("\n")[0]) if "\n" in text else None

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "pytest", *(word for name in self.plugins for word in ("-p", name)), *words]

    def pytest(self, *words: str) -> Done:
        (self.folder / "calls").unlink(missing_ok=True)
        done = subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Done(done.returncode, done.stdout + done.stderr, self.folder)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)
