"""The Python side of the orders: the GPU, the file, the proof; and the overlay with senseless files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dcgmi_stand_in
import pytest

from torchaos.harness.fault_drivers import gpu as gpu_fault
from torchaos.harness.fault_drivers.gpu import XIDS
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.protocol.wire import Kind
from torchaos.injectors.gpu_reports import Lost, Xid

REPOSITORY = Path(__file__).parents[2]


def started(env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that waits to be killed. It runs already: right after exec(2), /proc does not show its environment
    yet."""
    line = ["sh", "-c", "echo ready; read _"]
    process = subprocess.Popen(line, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the environment of local rank 1, and of a job whose orders are in tmp_path."""
    env = {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6", "TORCHAOS_NVML_CONTROL": str(tmp_path)}
    process = started({**os.environ, **env, "TORCHAOS_NVML_GPUS": "8"})
    yield process
    process.kill()
    process.wait()


def site(process: subprocess.Popen[bytes], fault: str = "gpu.lost") -> Any:
    return SimpleNamespace(fault=fault, pids=[process.pid], undo_copies=Path(os.devnull))


def handles_of(fault: Any, where: Any) -> list[Any]:
    return list(fault.changes(where))


def test_orders_are_a_file_that_goes_when_it_is_taken_back(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The handle is made first, holds for what is written then, and leaves the folder as it was; twice is once."""
    fault = Lost()
    (handle,) = handles_of(fault, site(rank))
    assert handle.is_undone()
    fault.apply(site(rank))
    (file,) = tmp_path.glob("*.nvml")
    assert file.read_text().splitlines()[0] == "gpu6.lost = 1", "local rank 1 has the second of the visible GPUs"
    assert not handle.is_undone()
    handle.undo()
    handle.undo()
    assert handle.is_undone()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nameless", [True, False])
def test_who_dies_over_it_leaves_no_file(
    rank: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    """Right before the orders get their name the folder is as it was: they have none until they are whole. Where a file
    system knows no such files, they are written all the same."""

    def dies(*_anything: object, **_more: object) -> None:
        raise InterruptedError

    if nameless:
        monkeypatch.setattr(os, "link", dies)
        with pytest.raises(InterruptedError):
            Lost().apply(site(rank))
        assert list(tmp_path.iterdir()) == []
    else:
        monkeypatch.delattr(os, "O_TMPFILE")
        Lost().apply(site(rank))
        assert [path.name for path in tmp_path.iterdir()] == ["gpu_lost.nvml"]


def test_two_faults_have_files_of_their_own(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Taking one back leaves the other's orders."""
    first, second = site(rank, "one"), site(rank, "two")
    handles = [*handles_of(Lost(gpu=0), first), *handles_of(Xid(number=48), second)]
    Lost(gpu=0).apply(first)
    Xid(number=48).apply(second)
    handles[0].undo()
    assert [path.name for path in tmp_path.glob("*.nvml")] == ["two.nvml"]


def test_a_job_without_a_folder_for_orders_is_told_what_to_add() -> None:
    """The error names the lines that job.env lacks."""
    with pytest.raises(ChaosError, match=r'add to job.env: .TORCHAOS_NVML_PATH: "\{nvml\}"'):
        gpu_fault.folders_of([os.getpid()])


def test_each_node_has_orders_of_its_own(tmp_path: Path) -> None:
    """A fault of the ranks of one node leaves the other node's folder as it is; one of both is in each, by its own GPU;
    what is served there is told with the node."""
    ranks, folders = [], [tmp_path / "node0", tmp_path / "node1"]
    for node, folder in enumerate(folders):
        folder.mkdir()
        env = {"LOCAL_RANK": str(node), "TORCHAOS_NVML_CONTROL": str(folder), "TORCHAOS_NVML_GPUS": "2"}
        ranks.append(started({**os.environ, **env}))
    try:
        one, both = site(ranks[1]), site(ranks[0], "both")
        both.pids = [process.pid for process in ranks]
        Lost().apply(one)
        assert not list(folders[0].iterdir())
        assert len(handles_of(Lost(), both)) == 2
        Lost().apply(both)
        said = [(folder / "both.nvml").read_text().splitlines()[0] for folder in folders]
        assert said == ["gpu0.lost = 1", "gpu1.lost = 1"]
        told: list[dict[str, Any]] = []
        (probe,) = Lost().probes(one)
        (folders[1] / "nvml.log").write_text(f"{time.monotonic():.6f} pid 7 served gpu1.lost = 1 on node 1\n")
        probe.sample(lambda kind, data: told.append(dict(data)))  # type: ignore[arg-type, return-value]
        assert [effect["node"] for effect in told] == [1]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("env", "gpu", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, None, r"which GPU local rank 1 uses \(CUDA_VISIBLE_DEVICES=0,0\); write gpu"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-81d4"}, None, r"\(CUDA_VISIBLE_DEVICES=GPU-81d4\); write gpu, NVML's index"),
        ({"CUDA_VISIBLE_DEVICES": "0,9"}, None, "there is no GPU 9: TORCHAOS_NVML_GPUS makes 8 simulated ones"),
        ({}, 8, "there is no GPU 8: TORCHAOS_NVML_GPUS makes 8"),
        ({"TORCHAOS_NVML_GPUS": "1"}, None, "there is no GPU 1: TORCHAOS_NVML_GPUS makes 1"),
    ],
)
def test_a_gpu_that_is_not_known_or_not_there_is_refused(
    tmp_path: Path, env: dict[str, str], gpu: int | None, said: str
) -> None:
    """Before anything is changed. An order for a wrong GPU would be served to nobody, or for a GPU of another rank."""
    whole = {"LOCAL_RANK": "1", "TORCHAOS_NVML_CONTROL": str(tmp_path), "TORCHAOS_NVML_GPUS": "8", **env}
    process = started({**os.environ, **whole})
    try:
        with pytest.raises(ChaosError, match=said):
            Lost(gpu=gpu).changes(site(process))
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def test_a_folder_that_nodes_share_keeps_them_apart(tmp_path: Path) -> None:
    """The job names one folder that is not there when the nodes start: the orders say which node each is for."""
    ranks = []
    for node in ("0", "1"):
        env = {"LOCAL_RANK": node, "TORCHAOS_NODE": node, "TORCHAOS_NVML_CONTROL": str(tmp_path)}
        ranks.append(started({**os.environ, **env, "TORCHAOS_NVML_GPUS": "2"}))
    try:
        both = site(ranks[0])
        both.pids = [process.pid for process in ranks]
        assert len(handles_of(Lost(), both)) == 1
        Lost().apply(both)
        lines = (tmp_path / "gpu_lost.nvml").read_text().splitlines()
        assert [line for line in lines if "node" in line or "lost" in line] == [
            "node = 0", "gpu0.lost = 1", "node = 1", "gpu1.lost = 1",
        ]  # fmt: skip
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_what_an_earlier_fault_served_proves_no_later_one(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The same fault comes twice, and its watcher died of the first: nobody saw the second."""
    told: list[Any] = []
    log = tmp_path / "nvml.log"
    log.write_text(f"{time.monotonic() - 5:.6f} pid 7 served gpu6.lost = 1\n")
    Lost().apply(site(rank, "second"))
    (probe,) = Lost().probes(site(rank, "second"))
    probe.sample(lambda kind, data: told.append(data))  # type: ignore[arg-type, return-value]
    assert told == []
    with open(log, "a") as file:
        file.write(f"{time.monotonic():.6f} pid 8 served gpu6.lost = 1\n")
    probe.sample(lambda kind, data: told.append(data))  # type: ignore[arg-type, return-value]
    assert [one["served_to"] for one in told] == [8]


def test_what_a_watcher_was_served_is_told_once(tmp_path: Path) -> None:
    """Only orders of this fault, each for each process once, and no line that is not whole."""
    log = tmp_path / "nvml.log"
    told: list[dict[str, Any]] = []
    probe = gpu_fault.AnsweredQueries(log, "f", frozenset({"gpu1.lost"}))

    def emit(kind: Kind, data: Any) -> Any:
        told.append({"kind": kind, **data})

    probe.sample(emit)
    log.write_text(
        "1.5 pid 7 served gpu1.lost = 1\n1.6 pid 7 served gpu0.power = 3\n1.7 pid 7 served gpu1.lost = 1\n1.8 pid 9 ser"
    )
    probe.sample(emit)
    assert [(one["kind"], one["served_to"], one["served_mono_s"]) for one in told] == [(Kind.EFFECT, 7, 1.5)]
    with open(log, "a") as file:
        file.write("ved gpu1.lost = 1\n")
    probe.sample(emit)
    assert [one["served_to"] for one in told] == [7, 9]


def test_kernel_lines_are_in_the_drivers_form() -> None:
    """What node problem detectors look for is found in every line of every Xid: the number, and the PCI address."""
    import re

    for xid in XIDS.values():
        lines = xid.kernel_lines("0000:3b:00")
        numbers = [int(found[1]) for line in lines if (found := re.search(r"NVRM: Xid.*?: (\d+),", line))]
        assert numbers == [xid.number, *([154] if xid.action else [])], lines
        assert all("0000:3b:00" in line for line in lines)
    with_process = XIDS[79].kernel_lines("0000:3b:00", (77, "python"))[0]
    assert with_process == "NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python, GPU has fallen off the bus."


def test_no_control_file_crashes_the_overlay() -> None:
    """A sample of the campaign: mutated control files under address and undefined-behaviour sanitizers."""
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    if runtime.returncode != 0 or "/" not in runtime.stdout:
        pytest.skip("gcc with libasan is not here: apt-get install gcc")
    command = [
        sys.executable,
        str(REPOSITORY / "lab" / "campaigns" / "nvml_control.py"),
        "--files",
        "100",
        "--seed",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernels_log_gets_a_record_for_each_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level and text as the driver's; with `journald` the prefix twice, since journald cuts one off."""
    from torchaos.injectors import gpu_kernel_log

    device = tmp_path / "kmsg"
    device.touch()
    monkeypatch.setattr(gpu_kernel_log, "DEVICE", str(device))
    where = SimpleNamespace(fault="k", pids=[])
    gpu_kernel_log.KernelLog(number=79).apply(where)
    lines = device.read_text().splitlines()
    assert lines[0].startswith("<2>NVRM: Xid (PCI:0000:")
    assert len(lines) == 3
    gpu_kernel_log.KernelLog(number=63, journald=True).apply(where)
    assert device.read_text().startswith("<2>NVRM: NVRM: Xid")
    with pytest.raises(ChaosError, match="Xid 1 is not known"):
        gpu_kernel_log.KernelLog(number=1).changes(where)


def test_the_kernels_log_is_felt_when_the_kernel_shows_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the injector wrote a line proves nothing, nor does the same line of an earlier fault."""
    from torchaos.harness.fault_drivers.gpu import XIDS, pci_of
    from torchaos.injectors import gpu_kernel_log

    device, told = tmp_path / "kmsg", list[Any]()
    monkeypatch.setattr(gpu_kernel_log, "DEVICE", str(device))
    where: Any = SimpleNamespace(fault="k", pids=[])
    fault = gpu_kernel_log.KernelLog(number=79)
    (line, *_more) = XIDS[79].kernel_lines(pci_of(0))
    old, new = (f"2,{number},212393,-;{line}\n SUBSYSTEM=acpi\n" for number in (41, 42))
    device.write_text(old)
    fault.changes(where)
    (probe,) = fault.probes(where)

    def emit(kind: Kind, data: Any, **_more: Any) -> Any:
        told.append((kind, data["effect"]))

    probe.sample(emit)
    assert told == []
    device.write_text(old + new)
    for _ in range(2):
        probe.sample(emit)
    assert [kind for kind, _effect in told] == [Kind.EFFECT]
    assert told[0][1].startswith("the kernel's log shows, as record 42, `NVRM: Xid (PCI:")
    device.unlink()
    probe.sample(emit)  # there is no log
    assert len(told) == 1


def test_the_kernels_log_needs_consent_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the scenario alone nor the command line alone is enough."""
    from torchaos.harness.interfaces import UsageError
    from torchaos.harness.running.planner import make_plan
    from torchaos.harness.scenario.loader import load

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    path = tmp_path / "s.yaml"
    scenario = (
        "scenario: kmsg\njob: {command: torchrun --nproc-per-node 2 train.py}\n"
        "faults: [{inject: gpu.kernel_log, target: {rank: 0}, when: {step: 5}}]\nassert: [completed]\n"
    )
    for text, given in ((scenario, ("kmsg",)), (scenario + "consent: [kmsg]\n", ())):
        path.write_text(text)
        with pytest.raises(UsageError, match="consent"):
            make_plan(load(path), path, seed=0, consent=given)


def test_dcgm_is_asked_to_inject_and_felt_when_it_shows_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that dcgmi's manual names. That dcgmi took the value proves nothing, nor does a value that was shown
    before the fault."""
    from torchaos.injectors.gpu_dcgm import DcgmInject

    dcgmi_stand_in.put_on_path(tmp_path, monkeypatch)
    told: list[Any] = []
    where: Any = SimpleNamespace(fault="d", pids=[])
    fault = DcgmInject(field=230, value=79, gpu=1)

    def emit(kind: Kind, data: Any, **_more: Any) -> Any:
        told.append((kind, data["effect"]))

    (probe,) = fault.probes(where)
    probe.sample(emit)
    assert told == []
    fault.apply(where)
    for _ in range(2):
        probe.sample(emit)
    assert told == [(Kind.EFFECT, "DCGM shows 79 in field 230 of GPU 1")]
    (late,) = fault.probes(where)
    late.sample(emit)
    assert len(told) == 1
    with pytest.raises(ChaosError, match="dcgmi test --inject: no such GPU"):
        DcgmInject(field=230, value=79, gpu=9).apply(where)


def test_a_command_is_run_with_the_overlay(tmp_path: Path) -> None:
    """`python -m torchaos.harness.fault_drivers.gpu` gives a command the library and the orders, and says what is wrong
    without one."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    (tmp_path / "orders.nvml").write_text("gpus = 3\n")
    wrapper = [sys.executable, "-m", "torchaos.harness.fault_drivers.gpu"]
    asks = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())"
    env = {**os.environ, "TORCHAOS_NVML_REAL": "none"}
    command = [*wrapper, "--control", str(tmp_path), sys.executable, "-c", asks]
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == "3\n"
    for wrong in ([], ["no-such-program"]):
        done = subprocess.run([*wrapper, *wrong], capture_output=True, text=True, check=False)
        assert done.returncode == 3
        assert "Traceback" not in done.stderr
