"""The tutorial works as it is written, with the output that it shows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import REPOSITORY, Torchaos, blocks

PAGE = [REPOSITORY / "docs" / "tutorial.md"]
BEFORE = ("make", "pip")  # what the test has behind it: torchaos is installed
VARIES = re.compile(r"Linux \S+|/\S+|\d[\d.]*(?: (?:m?s|min)\b)?")
JOB = "torchrun "


def sessions() -> Iterator[tuple[str, list[str]]]:
    """Each command with the lines that are shown below it."""
    for block in blocks("console", PAGE):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            if not command.startswith(BEFORE):
                yield command, [line for line in shown if line != "..."]


def blurred(text: str) -> str:
    """Without what is another at each run: numbers, paths, and where lines end."""
    return " ".join(VARIES.sub("#", text).split())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder: the job that the tutorial offers, and the scenarios that it has written."""
    monkeypatch.setenv("COLUMNS", "100")
    shutil.copy(REPOSITORY / "tests" / "trainers" / "plain_ddp.py", tmp_path / "train.py")
    for block in blocks("yaml", PAGE):
        (tmp_path / block.name).write_text(block.text)
    return tmp_path


def lacking(shown: list[str], output: str) -> list[str]:
    there = blurred(output)
    return [line for line in shown if blurred(line) not in there]


def test_what_takes_no_job(torchaos: Torchaos, place: Path) -> None:
    """`doctor`, `validate` and `plan` say what is shown, and the mistake is told as it is shown."""
    quick = [(command, shown) for command, shown in sessions() if command.split()[1] in ("doctor", "validate", "plan")]
    assert len(quick) == 3
    for command, shown in quick:
        done = torchaos(*command.split()[1:])
        assert lacking(shown, done.stdout) == [], done.stdout + done.stderr
    path = place / "kill-rank.yaml"
    path.write_text(path.read_text().replace("backward", "backwards"))
    done = torchaos("validate", "kill-rank.yaml")
    (mistake,) = [block.text.strip() for block in blocks("text", PAGE)]
    begin, _, end = mistake.partition(", ... or ")
    assert done.returncode == 3
    assert done.stderr.startswith(begin)
    assert done.stderr.strip().endswith(end)


@pytest.mark.long
@pytest.mark.job
@pytest.mark.timeout(900)
def test_from_beginning_to_end(torchaos: Torchaos, place: Path) -> None:
    """Every command after the installation, in order, with a real job: it passes, fails once the line is gone, and an
    attached job goes on afterwards."""
    job: subprocess.Popen[bytes] | None = None
    try:
        for command, shown in sessions():
            if JOB in command:
                job = started(command, place)
                continue
            words = shlex.split(command)
            if words[0] == "sed":
                subprocess.run(words, cwd=place, check=True)
                continue
            if "--attach" in words:
                assert job is not None
                words[-1] = str(job.pid)
            done = torchaos(*words[1:])
            assert lacking(shown, done.stderr + done.stdout) == [], done.stdout + done.stderr
        assert job is not None
        assert job.poll() is None
    finally:
        if job is not None:
            job.terminate()
            job.wait(300)


def started(command: str, place: Path) -> subprocess.Popen[bytes]:
    """The job that is attached to, once it has saved a checkpoint; without the shell, so that the pid is torchrun's."""
    setting, _, rest = command.partition(" ")
    words = shlex.split(rest.partition(" > ")[0])
    shutil.copy(REPOSITORY / "tests" / "trainers" / "plain_ddp.py", place / "train.py")
    with (place / "job.log").open("wb") as log:
        env = {**os.environ, **dict([setting.split("=")])}
        job = subprocess.Popen(words, cwd=place, env=env, stdout=log, stderr=log)
    end = time.monotonic() + 120
    while not (place / "out" / "checkpoint.pt").exists():
        assert job.poll() is None
        assert time.monotonic() < end, "no checkpoint of the attached job"
        time.sleep(0.05)
    return job
