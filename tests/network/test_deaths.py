"""If the harness dies in the middle of network faults, nothing is left behind."""

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
from typing import Any

import pytest

from torchaos.harness.host import processes
from torchaos.harness.monitoring.probes.process_tree import environ_of
from torchaos.harness.protocol.wire import ENV_RUN_ID
from torchaos.harness.running import capabilities
from torchaos.harness.running.launchers.local import keepers

DEATHS = int(os.environ.get("DEATHS", "200"))
LATEST_S = 1.2  # after the harness has its reaper
PROXY_LATEST_S = 3.0  # where there is a Toxiproxy server to start, which takes its time
ETCD_DEATHS, ETCD_LATEST_S = 12, 4.0

_HARNESS = """
import itertools, os, sys
from pathlib import Path
from types import SimpleNamespace
from torchaos.harness import registry
from torchaos.harness.interfaces import JobSpec
from torchaos.harness.running.launchers.local import Netns
from torchaos.harness.fault_drivers.site import OutsideSite
from torchaos.harness.fault_drivers.network.links import PacketDrop
from torchaos.harness.fault_drivers.network.traffic_counters import measured, meter_handle
from torchaos.harness.fault_drivers.network.network_faults import Shape, Shaper
from torchaos.harness.running.launchers.local_job import ProxiedLauncher
from torchaos.harness.rollback.reaper_client import ReaperClient
run, folder, proxied = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "proxied"
command = ("torchrun", "--rdzv-backend", "etcd-v2" if sys.argv[3] == "etcd" else "c10d")
launcher = ProxiedLauncher(Netns(), {"store": "node000:9"}, {"store"} if proxied else set(), folder / "proxy")
spec = JobSpec(command, folder, {"TORCHAOS_RUN_ID": run}, folder / "logs" / "job-0.log", 0, 3)
reaper = ReaperClient.start(folder, run)
print(flush=True)
reaper.record_undo("launcher", launcher.resources(spec), owner="launcher")
cluster = [SimpleNamespace(node=node) for node in launcher.create(spec)]
links = [live.node.link for live in cluster]
toxic = registry.find("injectors", "proxy.latency")(endpoint="store")
for number in itertools.count():
    cut = PacketDrop(f"cut-{number}", links[:1], links[1:])
    shaper = Shaper(f"slow-{number}", links[1], Shape(delay=5.0))
    there = dict(nodes=cluster[:1], cluster=cluster, endpoints=launcher.endpoints)
    site = OutsideSite(f"site-{number}", (), lambda *_: None, **there)
    faults = {
        "cut": (cut.handles, cut.apply),
        "slow": (shaper.handles(), shaper.apply),
        "meter": ([meter_handle(site)], lambda: measured(site, {"loss_percent": 100.0})),
    }
    if proxied:
        faults["toxic"] = (toxic.changes(site), lambda: toxic.apply(site))
    for fault, (handles, apply) in faults.items():
        reaper.record_undo(f"{fault}#{number}", handles, owner=fault)
        apply()
    for fault in reversed(faults):
        assert all(healed.verified for healed in reaper.undo(fault))
"""


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nothing_is_left_of_many_deaths(tmp_path: Path, links: Any) -> None:
    """SIGKILL at many random moments, from the making of the nodes to the healing of faults: every process that keeps a
    namespace, queues packets, measures or proxies is gone, and each handle is verified in the undo log."""
    proxied = capabilities.check("toxiproxy").present
    draw = random.Random(DEATHS)
    for number in range(DEATHS):
        after_s = draw.uniform(0, PROXY_LATEST_S if proxied else LATEST_S)
        _die(tmp_path / str(number), "proxied" if proxied else "plain", after_s)


@pytest.mark.long
@pytest.mark.needs("etcd")
@pytest.mark.timeout(900)
def test_nothing_is_left_of_an_etcd(tmp_path: Path, links: Any) -> None:
    """The same while a server for the rendezvous starts and runs: some of these deaths leave one behind that is up, and
    it goes too."""
    seen = [_die(tmp_path / str(number), "etcd", ETCD_LATEST_S * number / ETCD_DEATHS) for number in range(ETCD_DEATHS)]
    assert any(mark.endswith(".etcd") for marks in seen for mark in marks), f"no server was ever up: {seen}"


def _die(folder: Path, kind: str, after_s: float) -> set[str]:
    """One death, until nothing is left of it. Returns the marks of the processes that were there when it came."""
    run = f"deaths-{os.getpid()}-{kind}-{folder.name}"
    (folder / "undo").mkdir(parents=True)
    argv: list[Any] = [sys.executable, "-c", _HARNESS, run, folder, kind]
    harness = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert harness.stdout is not None
    assert select.select([harness.stdout], [], [], 60)[0], "the harness did not start"
    assert harness.stdout.readline(), "the harness ended"
    time.sleep(after_s)
    assert harness.poll() is None, "the harness ended by itself"
    marks = {mark for pid in _of(run) for mark in [_mark_of(pid)] if mark}
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    harness.stdout.close()
    _await_nothing(run, folder)
    return marks


def _await_nothing(run: str, folder: Path) -> None:
    end = time.monotonic() + 60
    while (left := _of(run)) or (bad := _unhealed(folder)):
        assert time.monotonic() < end, f"after 60 s: processes {left}, records {[] if left else bad}"
        time.sleep(0.05)


def _of(run: str) -> list[int]:
    """Every process that has a mark of this run, whichever."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (image := processes.image(int(name))):
            marks = [part for part in image[1].split(b"\0") if part.startswith(f"{ENV_RUN_ID}={run}".encode())]
            found += [int(name)] if marks else []
    assert keepers(run).startswith(run)
    return found


def _mark_of(pid: int) -> str:
    return environ_of(pid).get(ENV_RUN_ID, "")


def _unhealed(folder: Path) -> list[str]:
    states: dict[str, tuple[str, str]] = {}
    for line in (folder / "undo" / "undo.jsonl").read_bytes().split(b"\n")[:-1]:
        said = json.loads(line)
        if "record" in said:
            states[said["record"]] = said["state"], said.get("why") or ""
    return [f"{record} is {state}: {why}" for record, (state, why) in states.items() if state != "verified"]
