"""Nodes that use etcd: when a server is started for them, that it serves all of them, and that it ends with them."""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError, JobSpec, UsageError
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running import capabilities
from torchaos.harness.running.launchers import local
from torchaos.harness.running.launchers.local import Netns
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load

ASK = "import sys, urllib.request as r; print(r.urlopen(f'http://{sys.argv[1]}/v2/keys/', timeout=10).status)"


@pytest.mark.parametrize(
    ("command", "env", "wanted"),
    [
        ("torchrun --rdzv-backend etcd-v2 t.py", {}, True),
        ("torchrun --rdzv_backend=etcd t.py", {}, True),
        ("torchrun t.py", {"PET_RDZV_BACKEND": "etcd-v2"}, True),
        ("torchrun --rdzv-backend c10d t.py", {"PET_RDZV_BACKEND": "etcd-v2"}, False),
        ("torchrun t.py", {}, False),
        ("torchrun --standalone --rdzv-backend etcd-v2 t.py", {}, False),
        ("torchrun --rdzv-backend etcd-v2 --rdzv-endpoint mine:2379 t.py", {}, False),
        ("torchrun --rdzv-backend etcd-v2 --rdzv_endpoint=mine:2379 t.py", {}, False),
        ("torchrun --rdzv-backend etcd-v2 t.py", {"PET_RDZV_ENDPOINT": "mine:2379"}, False),
    ],
)
def test_a_server_is_wanted_where_the_job_names_etcd_and_no_endpoint(
    command: str, env: dict[str, str], wanted: bool
) -> None:
    """In each spelling that torchrun takes; the command goes before the environment, and an endpoint of the user's own
    is left alone. Only then does the launcher ask for etcd, and guard a server."""
    words = tuple(shlex.split(command))
    spec = JobSpec(words, Path("/"), {ENV_RUN_ID: "a-run", **env}, Path("/run/logs/job-0.log"), 0, 2)
    assert Netns.needs_of(words, env) == ({"etcd"} if wanted else set())
    assert (JobProcesses(local.mark_of("a-run")) in Netns().resources(spec)) == wanted


def test_a_machine_without_etcd_is_told_at_plan_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error that names the file, what is missing, and what to do; a job that does not need it is planned."""
    monkeypatch.setattr(capabilities, "check", lambda name: capabilities.Finding(name, name != "etcd", "", "get it"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    path = tmp_path / "scenario.yaml"
    for backend in ("c10d", "etcd-v2"):
        job = {"command": f"torchrun --rdzv-backend {backend} --nnodes 2 train.py"}
        fault = {"inject": "process.kill", "target": {"rank": 1}, "when": {"step": 5}}
        scenario = {"scenario": "made-up", "launcher": "netns", "job": job, "faults": [fault], "assert": ["completed"]}
        path.write_text(yaml.safe_dump(scenario))
        if backend == "c10d":
            assert "etcd" not in make_plan(load(path), path, seed=1).needs
    with pytest.raises(UsageError, match=r"scenario.yaml: this machine lacks etcd .*; get it"):
        make_plan(load(path), path, seed=1)


def test_an_etcd_without_the_v2_api_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's rendezvous speaks the v2 API, which etcd 3.6 has no more: its help does not name the option."""
    program = tmp_path / "etcd"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for options, present in (("--enable-v2 --data-dir", True), ("--data-dir", False)):
        program.write_text(f"#!/bin/sh\necho '{options}'\n")
        program.chmod(0o755)
        assert capabilities.check("etcd").present is present


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[JobSpec]:
    run = f"etcd-{uuid.uuid4().hex}"
    words = ("torchrun", "--rdzv-backend", "etcd-v2", "t.py")
    one = JobSpec(words, tmp_path, {**os.environ, ENV_RUN_ID: run}, tmp_path / "logs" / "job-0.log", 0, 2)
    yield one
    for handle in reversed(Netns().resources(one)):
        handle.undo()
        assert handle.is_undone()


@pytest.mark.needs("links", "etcd")
def test_all_nodes_reach_one_server_and_it_goes_with_the_run(spec: JobSpec) -> None:
    """Each node is told its address and gets an answer there; another submission meets in the same one; what it writes
    is not in the run directory; and with the resources it is gone."""
    launcher = Netns()
    for _ in range(2):
        nodes = launcher.create(spec)
        assert [node.env["PET_RDZV_ENDPOINT"] for node in nodes] == [local.ENDPOINT] * 2
    assert len(servers := processes.family(local.mark_of(spec.env[ENV_RUN_ID]))) == 1
    for node in nodes:
        assert node.link.namespace.run([sys.executable, "-I", "-c", ASK, local.ENDPOINT]).strip() == "200"
    assert not list((spec.log.parent.parent / "net" / "etcd" / "data").iterdir())
    for handle in reversed(launcher.resources(spec)):
        handle.undo()
        assert handle.is_undone()
    assert not any(processes.is_alive(pid, ticks) for pid, ticks in servers.items())


@pytest.mark.needs("links", "etcd")
def test_a_server_that_does_not_start_is_an_error(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how it ended, and where its log is."""
    monkeypatch.setattr(local, "PROGRAM", "false")
    with pytest.raises(ChaosError, match=r"etcd did not start: it ended with exit code 1; see .*server.log"):
        Netns().create(spec)
