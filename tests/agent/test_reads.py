"""The agent records which of its own files a rank reads, and no other files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import importlib.metadata, os, pkgutil, sys
from pathlib import Path
import torch
import own_model
[*importlib.metadata.distributions()]; [*pkgutil.iter_modules()]

own = Path(own_model.__file__).parent
(own / "config.json").read_text()
try:
    open(own / "local.yaml")
except FileNotFoundError:
    pass
sorted((own / "data").iterdir())
if not (pid := os.fork()):
    (own / "data" / "part-0.bin").read_bytes()
    os._exit(0)
os.waitpid(pid, 0)
(own / "log.txt").write_text("a line")
(own / "log.txt").read_text()
(own / "half").write_text("cached")
os.replace(own / "half", own / "whole")
(own / "whole").read_text()
open(os.environ["OTHER"]).read()
Path("ckpt").write_text("")
Path("ckpt").read_text()
"""


def reads(folder: Path) -> set[str]:
    lines = (folder / "agent" / "reads" / f"rank0-a0-p{pid_of(folder)}").read_bytes().split(b"\0")
    return {os.fsdecode(line) for line in lines if line}


def pid_of(folder: Path) -> int:
    (events,) = (folder / "events").glob("rank0-*.jsonl")
    return int(events.stem.rpartition("p")[2])


@pytest.mark.parametrize("cached", [False, True])
def test_the_jobs_own_files(rank: Any, tmp_path_factory: pytest.TempPathFactory, cached: bool) -> None:
    """Modules (by their byte code too), settings, files that are not there, folders, and what a data-loader worker
    opens; what the job writes is told apart, and installed packages, other folders, the run's own, and searches for
    modules and distributions are left out."""
    own, other = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("other") / "other.txt"
    (own / "data").mkdir()
    for name in ("own_model.py", "config.json", "data/part-0.bin"):
        (own / name).write_text("")
    other.write_text("")
    bootstrap = rank.environment((), (), 0)["PYTHONPATH"]
    env = {"PYTHONPATH": f"{bootstrap}:{own}", "OTHER": str(other), "PYTHONDONTWRITEBYTECODE": ""}
    for _ in range(1 + cached):  # the second time, only the byte code is opened
        for path in (rank.folder / "events").glob("*"):
            path.unlink()
        ran = rank.run(SCRIPT, hooks=("steps", "reads"), env=env)
        assert ran.code == 0, ran.output
    found = {line[0] + str(Path(line[1:]).relative_to(own)) for line in reads(rank.folder) if "__pycache__" not in line}
    assert found - {"w."} == {
        "rown_model.py", "rconfig.json", "rlocal.yaml", "ldata", "rdata/part-0.bin", "wlog.txt", "rlog.txt", "whalf",
        "wwhole", "rwhole",
    }  # fmt: skip


def test_enough_is_enough(rank: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A job that opens a file a step does not fill the disk with their names."""
    own = tmp_path_factory.mktemp("own")
    (own / "own_model.py").write_text("")
    bootstrap = rank.environment((), (), 0)["PYTHONPATH"]
    script = """
    import own_model, os
    for number in range(6000):
        try:
            open(os.path.join(os.path.dirname(own_model.__file__), str(number)))
        except FileNotFoundError:
            pass
    """
    ran = rank.run(script, hooks=("steps", "reads"), env={"PYTHONPATH": f"{bootstrap}:{own}"})
    assert ran.code == 0, ran.output
    assert len(reads(rank.folder)) == 5000


def test_an_error_in_it_is_no_matter_of_the_job(rank: Any) -> None:
    """The agent's record becomes useless, which is said; the job's own files are opened all the same."""
    script = """
    import sys
    import _torchaos.agent.file_reads as reads
    reads.writes = None
    print("read", len(open(sys.argv[0]).read()))
    """
    ran = rank.run(script, hooks=("steps", "reads"))
    assert "read" in ran.output, ran.output
    assert [one["hook"] for one in ran.failures] == ["reads"]
