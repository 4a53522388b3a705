"""lab/gpu-check: its rows exist, all of them fit into its time, and a call can be continued."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tarfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_until

from torchaos.harness.host.native_libraries import compiler
from torchaos.harness.running.planner import make_plan
from torchaos.harness.running.twin import fault_free
from torchaos.harness.running.twin_key import key_of
from torchaos.harness.scenario.loader import load

PROGRAM = Path(__file__).parents[2] / "lab" / "gpu-check"


def test_every_row_is_there_and_two_calls_are_enough() -> None:
    """A row is a scenario, ready or the check's own, or a program. All of them together usually take the time of two
    calls, of nine minutes and of four, and what is in `--only` is a row."""
    rows = runpy.run_path(str(PROGRAM))["ROWS"]
    folder = PROGRAM.parent / "gpu_check"
    for name in rows:
        ready = Path(str(files("torchaos.scenarios") / f"{name}.yaml"))
        assert any(path.is_file() for path in (ready, folder / f"{name}.py", folder / f"{name}.yaml")), name
    shared = {"facts", "job", "row", "scenario", "wheels"}
    own = {path.stem for path in folder.iterdir() if path.suffix in (".py", ".yaml")}
    assert own - shared == {name for name in rows if "/" not in name}
    assert sum(rows.values()) <= 12 * 60


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
    assert "| `dcgm` | not possible here | 0 | " in (tmp_path / "table.md").read_text()
    kept = json.loads((tmp_path / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**kept, "dcgm": {**kept["dcgm"], "found": "as it was"}}))
    assert call() == (0, "")
    assert "as it was" not in call("--again")[1]


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """lab/gpu_check/scenario.py."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent / "gpu_check"))
    return runpy.run_path(str(PROGRAM.parent / "gpu_check" / "scenario.py"))


def scenarios() -> list[str]:
    check = runpy.run_path(str(PROGRAM))
    return [name for name in check["ROWS"] if check["is_scenario"](name)]


def test_every_scenario_takes_the_job_of_the_check(scenario: dict[str, Any]) -> None:
    """It has job.py in the place of its own job, also where its command begins with {python}."""
    for name in scenarios():
        source = scenario["found"](name)
        command = load(source, [scenario["with_our_job"](source)]).job.command
        assert f" {scenario['JOB']} " in command
        assert "gpt_ddp.py" not in command


def test_scenarios_have_one_twin(scenario: dict[str, Any]) -> None:
    """A twin costs as much as a run. So the rows ask for the same, and the first makes it for the others."""
    keys = set()
    for name in ("process/kill-rank", "many_faults", "twin_noise"):
        source = scenario["found"](name)
        given = load(source, [scenario["with_our_job"](source), *scenario["for_one_twin"](source)])
        keys.add(key_of(fault_free(make_plan(given, source, 7))))
    assert len(keys) == 1


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
    device_count = staticmethod(lambda: 1)
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
    assert (slow["result"], slow["found"], slow["over"]) == ("fail", "not over after 2 s; last line: waiting", True)
    dies = check["run"]("dies", 60.0, {}, tmp_path)
    assert (dies["result"], dies["found"], dies["over"]) == ("fail", "it ended by signal 6; last line: so far", False)


STOPPED = """
import runpy, sys
from pathlib import Path
check = runpy.run_path(sys.argv[1])["main"].__globals__
nothing = {"env": {}, "versions": None}
check.update(ROWS={"slow": 0.5}, FOLDER=Path(sys.argv[2]), SHARE_S=2, facts=lambda env: ([], nothing))
sys.argv[1:] = ["--keep", sys.argv[2], *sys.argv[3:]]
sys.exit(check["main"]())
"""


def test_a_check_that_is_stopped_ends_its_row(tmp_path: Path) -> None:
    """A call of limited time is stopped by SIGTERM. The row would run on, and disturb the next call."""
    note = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nopen({str(note)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(note)!r} + '.new', {str(note)!r})\ntime.sleep(600)\n"
    )
    check = subprocess.Popen([sys.executable, "-c", STOPPED, str(PROGRAM), str(tmp_path), "--slow", "1000"])
    wait_until(note.exists, timeout_s=150)
    check.terminate()
    assert check.wait(300) == 143
    wait_until(lambda: not Path(f"/proc/{note.read_text()}").exists())


def test_a_row_that_is_not_over_at_the_end_of_a_call_has_no_result(tmp_path: Path) -> None:
    """It did not fail: it had less time than a row may take. The next call begins it again."""
    (tmp_path / "slow.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "results.json").write_text("{}")
    command = [sys.executable, "-c", STOPPED, str(PROGRAM), str(tmp_path), "--minutes", "0.1", "--slow", "1000"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "slow: stopped at the end of this call: not over after" in done.stdout
    assert json.loads((tmp_path / "results.json").read_text()) == {}


def test_a_watcher_of_xids_ends_soon_after_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits as long as the kernel runs, and three seconds more: without an event for nothing."""
    (tmp_path / "pynvml.py").write_text(
        "import time\nclass NVMLError_Timeout(Exception): pass\nnvmlEventTypeXidCriticalError = 8\n"
        "nvmlInit = nvmlEventSetCreate = lambda: None\nnvmlDeviceGetCount = lambda: 1\n"
        "nvmlDeviceGetHandleByIndex = lambda index: index\nnvmlDeviceRegisterEvents = lambda *given: None\n"
        "def nvmlEventSetWait_v2(events, wait_ms):\n    time.sleep(wait_ms / 50_000)\n    raise NVMLError_Timeout\n"
    )
    monkeypatch.syspath_prepend(str(PROGRAM.parent / "gpu_check"))
    watch = runpy.run_path(str(PROGRAM.parent / "gpu_check" / "xid.py"))["WATCH"]
    watcher = subprocess.Popen(
        [sys.executable, "-c", watch], env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watcher.stdout
    assert watcher.stdout.readline() == "watching\n"
    assert watcher.poll() is None
    assert watcher.communicate(timeout=300)[0] == ""
    assert watcher.returncode == 0


def test_the_reason_of_a_program_is_its_first_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind the prefix that torch gives it; what torchrun says of it comes later. Without one, the last line."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent / "gpu_check"))
    why = runpy.run_path(str(PROGRAM.parent / "gpu_check" / "row.py"))["why"]
    said = "NCCL WARN Error: no\n[rank1]: Traceback\n[rank1]: AssertionError: delay: 0.1 s only\nChildFailedError: \n"
    assert why(subprocess.CompletedProcess([], 1, "", said)) == "AssertionError: delay: 0.1 s only"
    assert why(subprocess.CompletedProcess([], 1, "", "torch 2.6 has no such thing\n")) == "torch 2.6 has no such thing"
    assert why(subprocess.CompletedProcess([], 3, "", "")) == "exit code 3"


def test_the_rank_that_answers_for_ras_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of a machine listens at RAS's port; if it were stopped, nobody would answer."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent / "gpu_check"))
    ras = runpy.run_path(str(PROGRAM.parent / "gpu_check" / "ras.py"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(ras["hang_watch"], "ADDRESS", f"localhost:{server.getsockname()[1]}")
        assert ras["not_the_server"]({0: 1, 1: os.getpid()}) == 0
        assert ras["not_the_server"]({0: os.getpid(), 1: 1}) == 1


def test_the_command_of_the_docs_is_short_enough() -> None:
    """A tool that lends a machine may take 2,000 characters."""
    page = (PROGRAM.parents[1] / "docs" / "gpu.md").read_text()
    command = page[page.index("python3 -m pip install -q --no-index") :].partition("```")[0]
    assert "--results" in command
    assert len(command) <= 2000
