"""launcher: slurm and the faults of Slurm, with stand-ins for its programs; tests/clusters has a real one."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slurm_programs

from torchaos.harness import registry
from torchaos.harness.fault_drivers.site import OutsideSite
from torchaos.harness.host.cluster_tools import ask
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.running.capabilities import check
from torchaos.harness.running.launchers.slurm import Slurm, SlurmNode
from torchaos.harness.running.nodes import node_exec
from torchaos.harness.running.nodes.agent_socket import JOB, place_of
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load

_RUNNING = "JobId=7 JobName=run-1 JobState=RUNNING Reason=None Restarts=0 NodeList=n1,n2"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the programs, which the tests' user may only use as a user may."""
    folder = tmp_path / "bin"
    folder.mkdir()
    slurm_programs.install(folder)
    for name in ("srun", "salloc"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    (folder / "job").write_text(_RUNNING)
    (folder / "work").write_text("7.1|run-1\n")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return folder


def _site(*nodes: SlurmNode) -> OutsideSite:
    live: Any = [SimpleNamespace(node=node, run_id="run-1") for node in nodes]
    return OutsideSite("f", (), lambda kind, data: None, nodes=live)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("job", "work", "over"),
    [
        (_RUNNING, "7.1|run-1", False),
        (_RUNNING, "7.2|run-1.1", True),  # the step of the next submission
        (_RUNNING.replace("Restarts=0", "Restarts=1"), "7.1|run-1", True),
        (_RUNNING.replace("RUNNING", "PENDING"), "7.1|run-1", True),
        (_RUNNING.replace("n1,n2", "n1"), "7.1|run-1", True),
    ],
)
def test_what_slurm_says_of_a_node(slurm: Path, job: str, work: str, over: bool) -> None:
    """The node is the job's as long as its step runs there, in this start of the job."""
    (slurm / "job").write_text(job)
    (slurm / "work").write_text(f"{work}\n")
    assert SlurmNode(1, "n2", "7", "run-1").over() is over


def test_a_node_that_is_out_of_service_already(slurm: Path) -> None:
    """Somebody else's reason is not replaced, because undo would put the node back."""
    (slurm / "node").write_text("drained|bad memory\n")
    fault = registry.find("injectors", "scheduler.drain")()
    with pytest.raises(ChaosError, match="bad memory"):
        fault.apply(_site(SlurmNode(1, "n2", "7", "run-1")))
    assert (slurm / "node").read_text() == "drained|bad memory\n"


def test_slurm_refuses(slurm: Path) -> None:
    """What Slurm says to an order that the user may not give is the reason why the fault did not land."""
    fault = registry.find("injectors", "scheduler.requeue")()
    with pytest.raises(ChaosError, match="access denied"):
        fault.apply(_site(SlurmNode(0, "n1", "7", "run-1")))


def test_the_evidence_is_of_all_nodes(slurm: Path) -> None:
    """Each node is looked at until Slurm says that it is not the job's any more, and reported once."""
    fault = registry.find("injectors", "scheduler.cancel_step")()
    (probe,) = fault.probes(_site(*(SlurmNode(index, f"n{index + 1}", "7", "run-1") for index in (0, 1))))
    seen: list[Mapping[str, Any]] = []
    for job in (_RUNNING, _RUNNING.replace("n1,n2", "n1"), _RUNNING.replace("RUNNING", "FAILED"), "forgotten"):
        (slurm / "job").write_text(job)
        probe.sample(lambda kind, data: seen.append({**data, "kind": kind}))
    assert [(one["kind"], one["node"]) for one in seen] == [(Kind.EFFECT, 1), (Kind.EFFECT, 0)]


@pytest.mark.parametrize(
    ("fault", "target", "words"),
    [
        ("node_down", {"node": 1}, "root, Slurm's own user, its operators"),
        ("requeue", {"nodes": [0, 1]}, r"write job.slurm: \{submit: batch\}"),
        ("cancel_step", {"node": 1}, r"write target: \{nodes: \[0, 1\]\}"),
    ],
)
def test_what_the_plan_refuses(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, target: Any, words: str
) -> None:
    """The plan says which right or which key is missing."""
    monkeypatch.setattr(os, "geteuid", lambda: 2000)
    file = tmp_path / "one.yaml"
    scenario = {
        "scenario": "one", "launcher": "slurm", "twin": "none", "assert": ["completed"],
        "job": {"command": "torchrun --nnodes 2 --nproc-per-node 1 x.py {run}"},
        "faults": [{"inject": f"scheduler.{fault}", "target": target, "when": {"time": "5s"}}],
    }  # fmt: skip
    file.write_text(json.dumps(scenario))
    with pytest.raises(UsageError, match=words):
        make_plan(load(file), file, 0)


def test_programs_without_a_controller_are_no_cluster(slurm: Path) -> None:
    """The programs alone can start nothing: the machine lacks Slurm, and is told how to find out."""
    assert check("slurm").present
    (slurm / "scontrol").write_text("#!/bin/sh\necho 'Slurmctld(primary) at head is DOWN'\n")
    found = check("slurm")
    assert not found.present
    assert "scontrol ping finds a controller" in found.remedy


def test_an_error_of_slurm_is_told_whole_and_once(slurm: Path) -> None:
    """Each line of a program begins with its name, which is said once, and no line is cut in its middle."""
    lines = [f"squeue: error: cause {n}: {'x' * 90}" for n in range(9)]
    (slurm / "squeue").write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in lines) + "exit 1\n")
    with pytest.raises(OSError, match=r"^squeue: error: cause [1-9]: x{90} error: cause") as told:
        ask(["squeue"])
    assert str(told.value).count("squeue") == 1
    assert str(told.value).endswith(f"cause 8: {'x' * 90}")


def test_an_allocation_that_has_lost_a_node(slurm: Path) -> None:
    """It is given back before the next submission, which gets another; one that is pending again is waited for."""
    launcher, spec = Slurm(), SimpleNamespace(nodes=2)
    launcher._own = "7"
    assert launcher._goes_on(spec)  # type: ignore[arg-type]
    (slurm / "job").write_text(_RUNNING.replace("RUNNING", "PENDING"))
    assert launcher._goes_on(spec)  # type: ignore[arg-type]
    (slurm / "job").write_text(_RUNNING.replace("n1,n2", "n1"))
    (slurm / "work").write_text("7|run-1|RUNNING\n")
    assert not launcher._goes_on(spec)  # type: ignore[arg-type]
    assert not (slurm / "work").read_text()


def test_what_a_job_left_on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Epilog finds the folders of the job's agents, and no other's, and they are gone when nothing is left to
    undo."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for mark, job in (("run-1.node0", "7"), ("run-2.node0", "8")):
        folder = place_of(mark).root
        folder.mkdir(parents=True)
        (folder / JOB).write_text(job)
    (found,) = node_exec.of_job("7")
    assert found.name == "run-1.node0"
    assert node_exec.recover(found) == ""
    assert not found.exists()
    assert place_of("run-2.node0").root.exists()


def test_a_batch_job_waits_for_its_command(slurm: Path, tmp_path: Path) -> None:
    """The script of the batch job runs the command of its own start of the job, when it is there."""
    from torchaos.harness.running.launchers.slurm import _BATCH

    script = tmp_path / "batch.sh"
    script.write_text(_BATCH.format(tmp_path / "launch"))
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    (tmp_path / "launch-7-0.sh").write_text("echo the first")
    process = subprocess.Popen(["sh", script], env=env, stdout=subprocess.PIPE, text=True)
    (tmp_path / "made").write_text("echo the second")
    (tmp_path / "made").rename(tmp_path / "launch-7-1.sh")
    assert process.communicate(timeout=300)[0] == "the second\n"


@pytest.mark.parametrize(
    ("job", "code"),
    [(_RUNNING.replace("RUNNING", "COMPLETED"), 0), (_RUNNING.replace("RUNNING", "PENDING"), 1),
     (_RUNNING.replace("Restarts=0", "Restarts=1"), 1), ("forgotten", 1)],
)  # fmt: skip
def test_the_end_of_a_batch_job(slurm: Path, job: str, code: int) -> None:
    """The command that follows a batch job goes on while Slurm does not answer, and while this start of the job runs
    or is cleaned up. Then it says whether the job is complete."""
    from torchaos.harness.running.launchers.slurm import _UNTIL_OVER

    (slurm / "job").write_text("Unable to contact slurm controller")
    process = subprocess.Popen(["sh", "-c", _UNTIL_OVER, "sh", "7", "0"])
    for said in (_RUNNING, _RUNNING.replace("RUNNING", "COMPLETING"), job):
        assert process.poll() is None
        (slurm / "new").write_text(said)
        (slurm / "new").rename(slurm / "job")
    assert process.wait(timeout=300) == code


@pytest.mark.parametrize("queued", [False, True], ids=["allocation", "job"])
def test_the_run_ends_while_it_waits_for_nodes(slurm: Path, queued: bool) -> None:
    """salloc, or a batch job that was requeued, may wait in the queue for hours; the end of the run does not."""
    (slurm / "salloc").write_text("#!/bin/sh\nexec sleep 600\n")
    (slurm / "job").write_text(_RUNNING.replace("RUNNING", "PENDING"))
    launcher, spec = Slurm(), SimpleNamespace(nodes=2, timeout_s=60.0, env={"TORCHAOS_RUN_ID": "run-1"})
    launcher._own = "7" if queued else ""
    threading.Timer(0.1, launcher.give_up).start()
    with pytest.raises(ChaosError, match="while it waited for nodes"):
        launcher.create(spec)  # type: ignore[arg-type]
