"""Runs of stand-in jobs in difficult environments, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dying import clean
from dying.families import FAMILIES
from dying.scene import HERE, STORE

WAIT_S = 250.0


@dataclass
class Bench:
    """A folder in which runs are started; every process that comes of them carries its tag."""

    stage: Path

    @property
    def tag(self) -> str:
        return f"DYING_TAG={self.stage}"

    def env(self, **more: str) -> dict[str, str]:
        homes = {
            name: str(self.stage / "home") for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")
        }
        path = f"{HERE / 'plugin'}:{os.environ.get('PYTHONPATH', '')}"
        return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "COLUMNS": "160", "TMPDIR": str(self.stage / "tmp"),
                "DYING_TAG": str(self.stage), **homes, **more}  # fmt: skip

    def run(self, family: str, out: Path | None = None, **env: str) -> Started:
        """Start `torchaos run` with the scenario of a family."""
        file = self.stage / f"{family}.yaml"
        file.write_text(json.dumps(FAMILIES[family].scenario(self.stage)))
        return self.torchaos("run", str(file), "--out", str(out or self.stage / "out"), **env)

    def torchaos(self, *arguments: str, **env: str) -> Started:
        command = [sys.executable, "-m", "torchaos.harness", *arguments]
        process = subprocess.Popen(command, cwd=self.stage, env=self.env(**env), stdin=subprocess.DEVNULL, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        return Started(self, process)

    def processes(self) -> list[str]:
        return list(clean.processes(self.tag, {os.getpid()}).values())

    def wait(self, look: Callable[[], Any], what: str) -> Any:
        """What `look` gives once it is true."""
        end = time.monotonic() + WAIT_S
        while not (seen := look()):
            assert time.monotonic() < end, (
                f"no {what} within {WAIT_S:g} s; last seen: {seen!r}; left: {self.processes()}"
            )
            time.sleep(0.01)
        return seen

    def wait_for_event(self, run: Started, kind: str, out: Path | None = None) -> Path:
        """The run directory, once the journal of `run` has such an event."""

        def look() -> Path | None:
            assert run.process.poll() is None, f"it ended before {kind}: {run.end()}"
            journals = (out or self.stage / "out").glob("*/events/harness.jsonl")
            return next((path.parents[1] for path in journals if f'"{kind}"' in path.read_text()), None)

        found: Path = self.wait(look, kind)
        return found

    def assert_clean(self) -> None:
        """No process is left, and the files that were there are as they were."""
        self.wait(lambda: not self.processes(), "clean machine")
        assert {path.name: path.read_bytes() for path in (self.stage / "store").iterdir()} == STORE


@dataclass
class Started:
    bench: Bench
    process: subprocess.Popen[str]

    def end(self, wait_s: float = 2 * WAIT_S) -> tuple[int, str]:
        """Exit code and output; never a traceback in it."""
        output = self.process.communicate(timeout=wait_s)[0]
        assert "Traceback" not in output, output
        return self.process.returncode, output


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    for name in ("store", "tmp", "home"):
        (tmp_path / name).mkdir()
    for name, content in STORE.items():
        (tmp_path / "store" / name).write_bytes(content)
    made = Bench(tmp_path)
    yield made
    for pid in clean.processes(made.tag, {os.getpid()}):  # of a test that failed
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with little more room than a run asks for."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
