"""Endpoints in a scenario: what is refused before anything is started, and the address that the job gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from torchaos.harness.fault_drivers import proxy
from torchaos.harness.fault_drivers.proxy import Endpoint
from torchaos.harness.host.toxiproxy import Api
from torchaos.harness.interfaces import ChaosError, JobSpec, Launcher, UsageError
from torchaos.harness.protocol.wire import start_ticks
from torchaos.harness.record.plan import Plan
from torchaos.harness.running import capabilities
from torchaos.harness.running.launchers.local import LocalNode
from torchaos.harness.running.launchers.local_job import ProxiedLauncher
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load

SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios" / "proxy").glob("*.yaml"))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has everything."""
    monkeypatch.setattr(capabilities, "check", lambda name: capabilities.Finding(name, True, "", ""))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


def plan(folder: Path, endpoint: str = "s3", **job: Any) -> Plan:
    text = {
        "scenario": "made-up", "assert": ["completed"],
        "job": {"command": "torchrun --nproc-per-node 2 train.py", "endpoints": {"s3": "127.0.0.1:9000"}, **job},
        "faults": [{"inject": "proxy.down", "with": {"endpoint": endpoint}, "when": {"step": 5}, "for": "2s"}],
    }  # fmt: skip
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(text))
    return make_plan(load(path), path, seed=1)


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_every_scenario_of_the_library_can_be_planned(path: Path) -> None:
    """Each names an endpoint of its job."""
    found = make_plan(load(path), path, seed=0)
    proxied = [fault for fault in found.faults if fault.inject.startswith("proxy.")]
    assert proxied
    assert {fault.params["endpoint"] for fault in proxied} <= found.job.endpoints.keys()


def test_the_job_is_led_to_the_proxy(tmp_path: Path) -> None:
    """A fault on an endpoint that the job is not told of by its placeholder would be felt by nobody: it is refused."""
    (fault,) = plan(tmp_path, env={"STORE": "http://{endpoint.s3}"}).faults
    assert (fault.target.ranks, fault.params["endpoint"], fault.duration_s) == ((), "s3", 2.0)
    with pytest.raises(UsageError, match=r"the proxy in front of s3; in its command or env, write \{endpoint\.s3\}"):
        plan(tmp_path, env={"STORE": "http://127.0.0.1:9000"})


@pytest.mark.parametrize(
    ("endpoint", "job", "words"),
    [
        ("s4", {}, "job.endpoints has no 's4'; name it there, as host:port"),
        ("s3", {"endpoints": {"s3": "http://127.0.0.1:9000"}}, "is not an address; write host:port"),
        ("s3", {"env": {"STORE": "{endpoint.other}"}}, r"unknown placeholder \{endpoint.other\}"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path: Path, endpoint: str, job: dict[str, Any], words: str) -> None:
    """An endpoint that is not there, one that is no host:port, a placeholder for none: each names the line."""
    with pytest.raises(UsageError, match=rf"scenario\.yaml:\d+:\d+: .*{words}"):
        plan(tmp_path, endpoint, **job)


class _Nodes(Launcher):
    """A launcher of two nodes of this machine, that meet at an address from the environment."""

    name: ClassVar[str] = "two"

    def resources(self, spec: JobSpec) -> list[Any]:
        return []

    def create(self, spec: JobSpec) -> list[Any]:
        return [LocalNode(index, {"PET_RDZV_ENDPOINT": "node000:29400"}) for index in range(2)]


def _fronted(proxied: set[str], env: dict[str, str]) -> list[Any]:
    upstreams = {"rendezvous": "node000:29400", "s3": "127.0.0.1:9000"}
    launcher = ProxiedLauncher(_Nodes(), upstreams, proxied, Path("/nowhere"))
    for number, name in enumerate(sorted(proxied)):
        launcher.endpoints[name] = Endpoint(name, upstreams[name], f"10.0.0.1:{7000 + number}", Api(1, 0, 0))
    spec = JobSpec(("true",), Path("/"), {"TORCHAOS_RUN_ID": "r", **env}, Path("/run/logs/job-0.log"), 0, 2)
    return list(launcher.create(spec))


def test_who_is_given_which_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node gets the proxy's address for the placeholder; only those that do not keep the rendezvous get it for
    that; an endpoint that no fault is about is reached directly."""
    monkeypatch.setattr(Api, "alive", lambda self: True)
    first, second = _fronted({"rendezvous"}, {"STORE": "http://{endpoint.s3}", "OTHER": "x"})
    assert (first.env["PET_RDZV_ENDPOINT"], second.env["PET_RDZV_ENDPOINT"]) == ("node000:29400", "10.0.0.1:7000")
    assert first.env["STORE"] == second.env["STORE"] == "http://127.0.0.1:9000"
    assert "OTHER" not in first.env
    first, second = _fronted({"s3"}, {"STORE": "http://{endpoint.s3}"})
    assert first.env["STORE"] == "http://10.0.0.1:7000"
    assert second.argv(["train", "--store={endpoint.s3}"]) == ["train", "--store=10.0.0.1:7000"]
    assert second.env["PET_RDZV_ENDPOINT"] == "node000:29400"


def test_no_file_of_the_users_is_taken_for_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks a proxy imports nothing from the folder that the harness was started in."""
    (tmp_path / "toxiproxy.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    with pytest.raises(OSError, match=f"the Toxiproxy server \\(pid {os.getpid()}\\)"):
        Api(os.getpid(), ticks, 1).ask()  # nobody listens at that port
    assert not (tmp_path / "executed").exists()


def test_a_server_that_never_answers_does_not_outlive_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, and the process that was started has ended."""
    program, started = tmp_path / proxy.PROGRAM, list[subprocess.Popen[bytes]]()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(proxy, "START_S", 0.2)

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(ChaosError, match="could not be put in front"):
        proxy.start_toxiproxy({"store": "127.0.0.1:9"}, "never", tmp_path / "proxy", None)
    server = next(one for one in started if str(one.args[0]).endswith(proxy.PROGRAM))  # type: ignore[index]
    try:
        assert server.returncode is not None
    finally:
        server.kill()
        server.wait()
