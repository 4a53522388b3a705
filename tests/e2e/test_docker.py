"""Scenarios on nodes that are containers: unchanged scenarios of other launchers, and scenarios that need an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos import REPOSITORY, RunScenario
from docker_engine import missing, private_engine

from torchaos.harness.host.cluster_tools import engine

SCENARIOS = REPOSITORY / "scenarios"
ELSEWHERE = ["network/partition-short", "network/loss", "network/delay", "node/freeze", "node/reboot"]
# The one of each test run does without a twin, and makes these assertions, which need none.
ALONE = {"container/pause": "recovery_time, checkpoint_integrity, {restarts: {max: 0}}, {completed: {steps: 40}}"}
ENGINES = sorted(f"container/{path.stem}" for path in (SCENARIOS / "container").glob("*.yaml"))


@pytest.mark.job
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in ALONE)) for name in [*ELSEWHERE, *ENGINES]],
)
def test_a_scenario_passes_on_containers(
    name: str, torchaos: RunScenario, docker_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing changed but the launcher: the fault lands, is felt and outlived, every assertion holds, and nothing
    is left in the engine."""
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    alone = ["--set", "twin=none", "--set", f"assert=[{ALONE[name]}]"] if name in ALONE else []
    run = torchaos(SCENARIOS / f"{name}.yaml", "--set", "launcher=docker", *alone)
    assert run.exit_code == 0, run
    (fault,) = run.result["faults"]
    assert fault["evidence"]
    with engine(docker_engine) as client:
        assert client.containers(all=True) == []
        assert [one["Name"] for one in client.networks() if one["Name"].startswith("torchaos")] == []


@pytest.mark.long
def test_an_engine_that_goes_away(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The engine ends in the middle of a run: what is left in it can't be known, so the exit code is 4, and the reason
    is said; once it is back, `recover` takes everything away."""
    if lacks := missing():
        pytest.skip(f"no {lacks}")
    scenario = tmp_path / "scenario.yaml"
    job: dict[str, Any] = {"command": ["/bin/sh", "-c", "sleep 60"], "nodes": 2, "world_size": 2, "timeout": "1m"}
    scenario.write_text(
        yaml.safe_dump({"scenario": "gone", "launcher": "docker", "job": job, "twin": "none", "assert": ["completed"]})
    )
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    torchaos = [sys.executable, "-m", "torchaos.harness"]
    folder = tmp_path_factory.mktemp("e")  # the name of a socket must be short
    with private_engine(folder) as where:
        env["DOCKER_HOST"] = where
        run = subprocess.Popen(
            [*torchaos, "run", str(scenario), "--out", str(tmp_path / "out")],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        _await_containers(where, 2)
    said, _ = run.communicate(timeout=150)
    assert run.returncode == 4, said
    assert "does not answer" in said
    with private_engine(folder) as where:
        _await_containers(where, 2, running=False)
        recovered = subprocess.run([*torchaos, "recover"], env=env, capture_output=True, text=True, check=False)
        assert recovered.returncode == 0, recovered.stdout + recovered.stderr
        with engine(where) as client:
            assert client.containers(all=True) == []


def _await_containers(where: str, number: int, running: bool = True) -> None:
    end = time.monotonic() + 60
    with engine(where) as client:
        while len(found := client.containers(all=not running)) < number:
            assert time.monotonic() < end, f"after 60 s there are only {found}"
            time.sleep(0.1)


@pytest.mark.long
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, docker_engine: str) -> None:
    """SIGINT in the middle: the job is ended, and the engine has nothing of it any more."""
    scenario = tmp_path / "scenario.yaml"
    job = {"command": ["/bin/sh", "-c", "sleep 60"], "nodes": 2, "world_size": 2}
    scenario.write_text(
        yaml.safe_dump({"scenario": "stop", "launcher": "docker", "job": job, "twin": "none", "assert": ["completed"]})
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "torchaos.harness", "run", str(scenario), "--out", str(tmp_path / "out")],
        env={**os.environ, "DOCKER_HOST": docker_engine}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    _await_containers(docker_engine, 2)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 2, said
    with engine(docker_engine) as client:
        assert client.containers(all=True) == []
