"""Measures the time from "partition" to the first dropped packet, and from "heal" to the first packet that is delivered
again.

There are two nodes, each a network namespace. Datagrams go from one to the other all the time, and the kernel stamps
the arrival of each. Compared in turn within a run are the harness (guarded on disk, applied, healed by the reaper and
verified), plain nft that adds and deletes the same table, and plain tc (a token bucket that is too small for any
packet). With --docker also `network disconnect` and `connect` of a Docker engine, by its own client, between two
containers.

Usage: python lab/bench/partition.py [--rounds 100] [--docker]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from intervals import percentile

from torchaos.harness.fault_drivers.network.links import Link, PacketDrop
from torchaos.harness.fault_drivers.network.udp_probe import Meter
from torchaos.harness.host.network_namespace import NetworkNamespace
from torchaos.harness.interfaces import JobSpec
from torchaos.harness.rollback.reaper_client import ReaperClient
from torchaos.harness.running.launchers.local import Netns

GAP_S = 0.0005  # between two datagrams
REST_S = 0.06  # between the end of "partition" and "heal"
Way = tuple[Callable[[int], None], Callable[[int], None]]  # partition, heal


def tick(peer: int, sender: str, receiver: str, record: Path) -> None:
    """Sends and receives datagrams in the sender's network namespace until the input ends. Then writes the times at
    which each was sent and arrived."""
    os.set_blocking(0, False)
    meter = Meter(peer, sender, receiver)
    print("ready", flush=True)
    ended = False
    while not ended:
        meter.send()
        time.sleep(GAP_S)
        meter.receive()
        with suppress(BlockingIOError):
            ended = os.read(0, 1) == b""
    record.write_text(json.dumps({"sent": meter.sent, "came": meter.came}))


@contextmanager
def ticking(
    namespace: NetworkNamespace, peer: NetworkNamespace, sender: str, receiver: str, record: Path
) -> Iterator[None]:
    argv = [sys.executable, __file__, "--tick", str(peer.pid), sender, receiver, str(record)]
    process = subprocess.Popen(namespace.enter(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"ready\n":
            sys.exit("the datagrams could not be sent")
        yield
    finally:
        process.stdin.close()
        process.wait(30)


def measure(ways: dict[str, Way], rounds: int) -> list[tuple[str, float, float, float, float]]:
    """(name, begin and end of "partition", begin and end of "heal") for each round and way, seconds since the epoch."""
    found = []
    for number in range(rounds):
        for name, (partition, heal) in ways.items():
            times = []
            for call in (partition, heal):
                times.append(time.time())
                call(number)
                times.append(time.time())
                time.sleep(REST_S)
            found.append((name, *times))
    return found  # type: ignore[return-value]


def effects(marks: list[Any], record: Path) -> dict[str, dict[str, list[float]]]:
    """Times in milliseconds by name: to the first dropped packet, to the first delivered packet, and of the calls."""
    raw = json.loads(record.read_text())
    sent, came = raw["sent"], {int(number): delay for number, delay in raw["came"].items()}
    found: dict[str, dict[str, list[float]]] = {}
    at = 0
    for name, cut_s, cut_done_s, heal_s, heal_done_s in sorted(marks, key=lambda mark: mark[1]):
        while at < len(sent) and sent[at] < cut_s:
            at += 1
        lost = next((i for i in range(at, len(sent)) if i not in came and sent[i] < heal_s), None)
        back = next((i for i in range(at, len(sent)) if i in came and sent[i] + came[i] / 1e3 > heal_s), None)
        if lost is None or back is None:
            sys.exit(f"{name}: nothing was dropped, or nothing came afterwards")
        ms = found.setdefault(name, {"drop": [], "partition call": [], "deliver": [], "heal call": []})
        ms["drop"].append(1e3 * (sent[lost] - cut_s))
        ms["partition call"].append(1e3 * (cut_done_s - cut_s))
        ms["deliver"].append(1e3 * (sent[back] + came[back] / 1e3 - heal_s))
        ms["heal call"].append(1e3 * (heal_done_s - heal_s))
    return found


def by_harness(links: list[Link], reaper: ReaperClient) -> Way:
    def cut(number: int) -> PacketDrop:
        return PacketDrop(f"bench-{number}", links[:1], links[1:])

    def partition(number: int) -> None:
        reaper.record_undo(f"bench#{number}", cut(number).handles, owner="bench")
        cut(number).apply()

    def heal(number: int) -> None:
        if not all(undo.verified for undo in reaper.undo("bench")):
            sys.exit("the harness could not take its partition back")

    return partition, heal


def by_nft(links: list[Link]) -> Way:
    cut = PacketDrop("plain", links[:1], links[1:])
    ((namespace, script),) = cut.scripts().items()
    table = [cut.handles[0].family, cut.handles[0].table]
    delete = namespace.enter(["nft", "delete", "table", *table])
    return (
        lambda _: _call(namespace.enter(["nft", "-f", "-"]), script),
        lambda _: _call(delete),
    )


def by_tc(links: list[Link]) -> Way:
    namespace, where = links[0].namespace, ["dev", links[0].device, "root"]
    nothing = ["tbf", "rate", "8bit", "burst", "10", "latency", "1ms"]
    return (
        lambda _: _call(namespace.enter(["tc", "qdisc", "add", *where, *nothing])),
        lambda _: _call(namespace.enter(["tc", "qdisc", "del", *where])),
    )


def _call(command: list[str], text: str = "") -> None:
    subprocess.run(command, input=text, text=True, check=True, capture_output=True)


def in_docker(rounds: int, folder: Path, run: str) -> dict[str, dict[str, list[float]]]:
    """The same times between two sleeping containers, on the engine that DOCKER_HOST names."""
    from docker.types import IPAMConfig, IPAMPool, Mount

    from torchaos.harness.host.cluster_tools import address, engine
    from torchaos.harness.running.launchers.docker import covering, host_mounts, make_host_image

    with engine(address()) as client:
        pool = IPAMConfig(pool_configs=[IPAMPool(subnet="10.79.0.0/24")])
        network, made = client.create_network(run, ipam=pool)["Id"], []
        image = make_host_image(client, run, run)
        try:
            mounts = [Mount(str(p), str(p), type="bind", read_only=True) for p in covering(host_mounts(["/bin/sleep"]))]
            for number in range(2):
                config = client.create_host_config(mounts=mounts, network_mode=network, init=True)
                at = client.create_endpoint_config(ipv4_address=f"10.79.0.{11 + number}")
                where = client.create_networking_config({network: at})
                made.append(
                    client.create_container(image, ["sleep", "600"], host_config=config, networking_config=where)["Id"]
                )
                client.start(made[-1])
            namespaces = [
                NetworkNamespace.of(client.inspect_container(container)["State"]["Pid"]) for container in made
            ]
            way: Way = (
                lambda _: client.disconnect_container_from_network(made[1], network),
                lambda _: client.connect_container_to_network(made[1], network, ipv4_address="10.79.0.12"),
            )
            with ticking(namespaces[0], namespaces[1], "10.79.0.11", "10.79.0.12", folder / "docker.json"):
                marks = measure({"docker network disconnect": way}, rounds)
            return effects(marks, folder / "docker.json")
        finally:
            for container in made:
                client.remove_container(container, force=True)
            client.remove_network(network)
            client.remove_image(image, force=True)


def main(rounds: int, docker: bool) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, run = Path(temporary), f"bench-partition-{os.getpid()}"
        (folder / "undo").mkdir()
        launcher = Netns()
        spec = JobSpec(("true",), folder, {"TORCHAOS_RUN_ID": run}, folder / "logs" / "job-0.log", 0, 2)
        reaper = ReaperClient.start(folder, run)
        try:
            reaper.record_undo("launcher", launcher.resources(spec), owner="launcher")
            links = [node.link for node in launcher.create(spec)]
            ways = {"harness": by_harness(links, reaper), "plain nft": by_nft(links), "plain tc": by_tc(links)}
            ends = links[0].namespace, links[1].namespace, links[0].address, links[1].address
            with ticking(*ends, folder / "record.json"):
                marks = measure(ways, rounds)
            found = effects(marks, folder / "record.json")
            if docker:
                found |= in_docker(rounds, folder, run)
        finally:
            reaper.close()
    print(f"{rounds} rounds; ms, p50 / p99; a datagram every {1e3 * GAP_S:g} ms or so\n")
    print("| | first packet dropped | partition call | first packet delivered | heal call |\n|---|---|---|---|---|")
    for name, ms in found.items():
        cells = (f"{percentile(times, 50):.1f} / {percentile(times, 99):.1f}" for times in ms.values())
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tick"]:
        tick(int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--rounds", type=int, default=100)
        parser.add_argument("--docker", action="store_true", help="compare with the engine that DOCKER_HOST names, too")
        options = parser.parse_args()
        main(options.rounds, options.docker)
