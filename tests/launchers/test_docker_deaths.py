"""If the harness dies in the middle of faults in containers, nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchaos.harness.host import processes
from torchaos.harness.host.cluster_tools import engine, of_run
from torchaos.harness.protocol.wire import ENV_RUN_ID

DEATHS = int(os.environ.get("DEATHS", "20"))
LATEST_S = 5.0  # after the harness has its reaper; nodes are up within two or three seconds

_HARNESS = """
import itertools, os, sys, time
from pathlib import Path
from torchaos.harness import registry
from torchaos.harness.interfaces import ChaosError, JobSpec
from torchaos.harness.fault_drivers.site import OutsideSite
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.running.launchers.docker import Docker
from torchaos.harness.running.launchers.local_job import Job
from torchaos.harness.running.launchers.job import job_env
from torchaos.harness.rollback.reaper_client import ReaperClient
run, folder = sys.argv[1], Path(sys.argv[2])
reaper = ReaperClient.start(folder, run)
print(flush=True)
env, own = (job_env(base, run_id=run, agent_plan=None) for base in (os.environ, {}))
script = "while :; do sleep 0.2; done"
spec = JobSpec(("/bin/sh", "-c", script), folder, env, folder / "logs" / "job-0.log", 0, 2, own)
journal = Journal(folder / "events")
record_undo = lambda handles, number: reaper.record_undo(f"launcher#{number}", handles, owner="launcher")
job = Job(lambda _: spec, Docker(), journal, record_undo=record_undo)
job.start()
for number in itertools.count():
    for name in ("container.pause", "container.disconnect", "container.limit"):
        fault = registry.find("injectors", name)()
        while True:
            site = OutsideSite(name, (), journal.emit, nodes=job.nodes()[1:], cluster=job.nodes())
            try:
                changes = fault.changes(site)
                break
            except ChaosError:  # the container is not up yet
                time.sleep(0.02)
        reaper.record_undo(f"{name}#{number}", changes, owner=name)
        fault.apply(site)
        assert all(healed.verified for healed in reaper.undo(name))
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nothing_is_left_of_many_deaths(tmp_path: Path, docker_engine: str) -> None:
    """SIGKILL at many random moments, from the making of the nodes to the healing of faults: no container, network,
    image or process of the run is left, and each handle is verified in the undo log."""
    draw = random.Random(DEATHS)
    for number in range(DEATHS):
        folder, run = tmp_path / str(number), f"docker-deaths-{os.getpid()}-{number}"
        for name in ("undo", "events", "logs"):
            (folder / name).mkdir(parents=True)
        harness = subprocess.Popen(
            [sys.executable, "-c", _HARNESS, run, folder],
            stdout=subprocess.PIPE, env={**os.environ, "DOCKER_HOST": docker_engine},
        )  # fmt: skip
        assert harness.stdout is not None
        assert select.select([harness.stdout], [], [], 60)[0], "the harness did not start"
        assert harness.stdout.readline(), "the harness ended"
        time.sleep(draw.uniform(0, LATEST_S))
        assert harness.poll() is None, "the harness ended by itself"
        harness.send_signal(signal.SIGKILL)
        harness.wait()
        harness.stdout.close()
        _await_nothing(docker_engine, run, folder)


def _await_nothing(where: str, run: str, folder: Path) -> None:
    end = time.monotonic() + 90
    while any(left := (_processes(run), _made(where, run), _unhealed(folder))):
        assert time.monotonic() < end, f"after 90 s: processes, things in the engine, records: {left}"
        time.sleep(0.1)


def _processes(run: str) -> list[int]:
    """Every process that has a mark of this run, whichever."""
    mark = f"{ENV_RUN_ID}={run}".encode()
    return [
        int(name) for name in os.listdir("/proc")
        if name.isdigit() and (image := processes.image(int(name)))
        and any(part.startswith(mark) for part in image[1].split(b"\0"))
    ]  # fmt: skip


def _made(where: str, run: str) -> list[str]:
    with engine(where) as client:
        mine = of_run(run)
        found = [*client.containers(all=True, filters=mine), *client.networks(filters=mine)]
        return [one["Id"] for one in (*found, *client.images(all=True, filters=mine))]


def _unhealed(folder: Path) -> list[str]:
    states: dict[str, tuple[str, str]] = {}
    for line in (folder / "undo" / "undo.jsonl").read_bytes().split(b"\n")[:-1]:
        said = json.loads(line)
        if "record" in said:
            states[said["record"]] = said["state"], said.get("why") or ""
    return [f"{record} is {state}: {why}" for record, (state, why) in states.items() if state != "verified"]
