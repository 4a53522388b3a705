"""lab/gpu-check: its rows exist, all of them fit into its time, and a call can be continued."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tarfile
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from waiting import wait_until

from torchaos.harness.host.native_libraries import compiler
from torchaos.harness.scenario.loader import load

PROGRAM = Path(__file__).parents[2] / "lab" / "gpu-check"


def test_every_row_is_there_and_all_of_them_fit() -> None:
    """A row is a ready scenario or a program, and all time limits together are less than 25 minutes."""
    rows = runpy.run_path(str(PROGRAM))["ROWS"]
    folder = PROGRAM.parent / "gpu_check"
    for name in rows:
        place = Path(str(files("torchaos.scenarios") / f"{name}.yaml")) if "/" in name else folder / f"{name}.py"
        assert place.is_file(), f"{name}: there is no {place}"
    shared = {"facts", "job", "row", "scenario", "wheels"}
    assert {path.stem for path in folder.glob("*.py")} - shared == {name for name in rows if "/" not in name}
    assert sum(rows.values()) <= 25 * 60


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: lab/gpu-check itself shows more")
def test_without_a_gpu_a_row_is_not_possible_and_is_not_run_again(tmp_path: Path) -> None:
    """The table says why, and never "pass". A second call takes the result that is kept; --again does not."""
    command = [sys.executable, str(PROGRAM), "--only", "dcgm", "--slow", "20", "--keep", str(tmp_path)]

    def call(*options: str) -> tuple[int, str]:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=170)
        return done.returncode, done.stdout

    code, said = call()
    assert code == 0, said
    assert "dcgm: not possible here: there is no GPU" in said
    assert "| `dcgm` | not possible here |" in (tmp_path / "table.md").read_text()
    kept = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**kept, "dcgm": {**kept["dcgm"], "found": "as it was"}}))
    assert call() == (0, "")
    assert "as it was" not in call("--again")[1]


def test_every_scenario_takes_the_job_of_the_check() -> None:
    """It has job.py in the place of its own job, also where its command begins with {python}."""
    sys.path.insert(0, str(PROGRAM.parent / "gpu_check"))
    try:
        row = runpy.run_path(str(PROGRAM.parent / "gpu_check" / "scenario.py"))
    finally:
        sys.path.pop(0)
    for name in runpy.run_path(str(PROGRAM))["ROWS"]:
        if "/" in name:
            source = Path(str(files("torchaos.scenarios") / f"{name}.yaml"))
            command = load(source, [row["with_our_job"](source)]).job.command
            assert f" {row['JOB']} " in command
            assert "gpt_ddp.py" not in command


def test_what_is_worth_to_bring_home_is_four_files(tmp_path: Path) -> None:
    """The logs of the rows, and of each run what `torchaos judge` and `explain` need, without checkpoints."""
    keep, home = tmp_path / "keep", tmp_path / "home"
    for name in ("table.md", "results.json", "backend", "xid.log", "runs/a/result.json", "runs/a/events/h.jsonl",
                 "runs/a/job/checkpoints/big.pt", "state/x"):  # fmt: skip
        (keep / name).parent.mkdir(parents=True, exist_ok=True)
        (keep / name).write_text(name)
    check = runpy.run_path(str(PROGRAM))
    check["bring_home"](keep, home)
    check["bring_home"](keep, home)
    assert sorted(path.name for path in home.iterdir()) == ["backend", "logs.tar.gz", "results.json", "table.md"]
    with tarfile.open(home / "logs.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["runs/a/events/h.jsonl", "runs/a/result.json", "xid.log"]


TORCH = """
class Zeros:
    def tolist(self): return [0.0] * 4
class cuda:
    is_available = staticmethod(lambda: True)
ones = lambda *shape, device: Zeros()
"""


def test_a_simulated_gpu_that_does_not_compute_is_found_by_trying(tmp_path: Path) -> None:
    """A row whose numbers matter is not possible there. It says what the GPU returned, and no name of a product."""
    (tmp_path / "torch.py").write_text(TORCH)
    row = [sys.executable, str(PROGRAM.parent / "gpu_check" / "gpu_memory.py")]
    done = subprocess.run(row, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 77, done.stderr
    assert done.stdout == "this GPU does not compute: torch.ones(4, device='cuda') is [0.0, 0.0, 0.0, 0.0]\n"


def test_an_nccl_that_reads_no_variable_is_found_by_its_contents(tmp_path: Path) -> None:
    """A row that works through a library which NCCL loads is not possible with an NCCL that never looks for one."""
    (tmp_path / "torch.py").write_text(f"import ctypes\n{TORCH}\nctypes.CDLL({str(tmp_path / 'libnccl.so.2')!r})\n")
    program = compiler()
    if program is None:
        pytest.skip("no C compiler here: apt-get install gcc")
    made = [program, "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(tmp_path / "libnccl.so.2")]
    subprocess.run(made, check=True)
    row = [sys.executable, str(PROGRAM.parent / "gpu_check" / "nccl_stall.py")]
    done = subprocess.run(row, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 77, done.stderr
    assert done.stdout == f"this NCCL does not read NVTX_INJECTION64_PATH: {tmp_path / 'libnccl.so.2'}\n"


def test_a_row_that_is_not_over_in_time_failed(tmp_path: Path) -> None:
    """So did one that ended by a signal. The table says which, with the last line of its output."""
    check = runpy.run_path(str(PROGRAM))
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "slow.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(600)\n")
    (folder / "dies.py").write_text("import os\nprint('so far', flush=True)\nos.abort()\n")
    check["run"].__globals__["FOLDER"] = folder
    slow = check["run"]("slow", 2.0, {}, tmp_path)
    assert (slow["result"], slow["found"]) == ("fail", "not over after 2 s; last line: waiting")
    dies = check["run"]("dies", 60.0, {}, tmp_path)
    assert (dies["result"], dies["found"]) == ("fail", "it ended by signal 6; last line: so far")


STOPPED = """
import runpy, sys
from pathlib import Path
check = runpy.run_path(sys.argv[1])["main"].__globals__
check.update(ROWS={"slow": 600}, FOLDER=Path(sys.argv[2]), facts=lambda env: [])
sys.argv[1:] = ["--keep", sys.argv[2]]
sys.exit(check["main"]())
"""


def test_a_check_that_is_stopped_ends_its_row(tmp_path: Path) -> None:
    """A call of limited time is stopped by SIGTERM. The row would run on, and disturb the next call."""
    note = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nopen({str(note)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(note)!r} + '.new', {str(note)!r})\ntime.sleep(600)\n"
    )
    check = subprocess.Popen([sys.executable, "-c", STOPPED, str(PROGRAM), str(tmp_path)])
    wait_until(note.exists, timeout_s=150)
    check.terminate()
    assert check.wait(60) == 143
    wait_until(lambda: not Path(f"/proc/{note.read_text()}").exists())
