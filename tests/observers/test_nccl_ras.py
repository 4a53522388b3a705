"""NCCL's health service (RAS) as an observer of hangs. A small server stands in for NCCL: it speaks the protocol of
NCCL's src/ras/client.cc, and answers with the JSON of NCCL's user guide."""

from __future__ import annotations

import copy
import json
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import wait_until

from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.observers import hang_watch
from torchaos.harness.monitoring.observers.hang_detectors import Opinion
from torchaos.harness.monitoring.observers.hang_watch import NcclRas, ask, communicators

# The example of the user guide of NCCL 2.30, chapter RAS, "JSON Output", with the pids of the test.
GUIDE: dict[str, Any] = {
    "nccl_version": "2.29.1", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
    "timestamp": "2025-12-19 13:06:53", "communicators_count": 1,
    "communicators": [{
        "hash": "0xae94423cfbb2ef4a", "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e", "size": 2,
        "ranks_count": 1, "missing_ranks_count": 1,
        "ranks": [{
            "rank": 0, "host": "172.16.64.245", "pid": 1524344, "cuda_dev": 0, "nvml_dev": 0,
            "status": {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False,
                       "abort_flag": False},
            "collective_counts": {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 0},
        }],
        "missing_ranks": [{
            "rank": 1, "host": "172.16.64.245", "pid": 1524345, "cuda_dev": 1, "nvml_dev": 1,
            "status": {"unresponsive": True, "considered_dead": False},
        }],
    }],
    "ras": {"collection_time_sec": 0.000, "timeouts_count": 0},
}  # fmt: skip


def with_counts(*counts: int) -> dict[str, Any]:
    """The guide's answer with so many all-reduces launched by each rank, and no rank missing."""
    answer = copy.deepcopy(GUIDE)
    one = answer["communicators"][0]
    ranks = []
    for rank, many in enumerate(counts):
        entry = copy.deepcopy(one["ranks"][0])
        entry["rank"], entry["pid"], entry["collective_counts"]["AllReduce"] = rank, 1524344 + rank, many
        ranks.append(entry)
    one.update(ranks=ranks, missing_ranks=[], size=len(ranks))
    return answer


def rank(number: int, pid: int = 0, world: int = 2) -> RankProcess:
    return RankProcess(number, number, 0, os.getpid(), 1, 0, world, inner_pid=pid or 1524344 + number)


RANKS = [rank(0), rank(1)]


class Service(socketserver.ThreadingTCPServer):
    """Answers as RAS does. `answer`: the JSON of the next STATUS; `formats`: whether it knows SET FORMAT."""

    allow_reuse_address = daemon_threads = True
    answer: Any = GUIDE
    formats = True
    asked = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Client(socketserver.StreamRequestHandler):
    server: Service

    def handle(self) -> None:
        for line in self.rfile:
            command = line.decode().strip().lower()
            if command.startswith("client protocol "):
                self.wfile.write(b"SERVER PROTOCOL 2\n")
            elif command.startswith("timeout ") or (command.startswith("set format ") and self.server.formats):
                self.wfile.write(b"OK\n")
            elif command == "status":
                self.wfile.write(json.dumps(self.server.answer).encode())
                self.server.asked += 1
                return
            else:
                self.wfile.write(f"ERROR: Unknown command {command}\n".encode())


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with Service(("127.0.0.1", 0), _Client) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(hang_watch, "ADDRESS", server.address)
        monkeypatch.setattr(hang_watch, "_EVERY_S", 0.02)
        yield server
        server.shutdown()
        thread.join()


def watched(observer: NcclRas, enough: Callable[[Opinion | None], bool], ranks: list[RankProcess] = RANKS) -> Opinion:
    """Asks the observer, as the watch does, until its opinion is the one that the test waits for."""
    opinion = wait_until(lambda: observer.look(time.monotonic(), True, ranks), enough, timeout_s=300.0)
    assert isinstance(opinion, Opinion)
    return opinion


def test_an_answer_of_the_guide() -> None:
    """The rank that does not respond is named; no counts of it are invented."""
    (one,) = communicators(json.dumps(GUIDE))
    assert (one.size, one.pids) == (2, {0: 1524344, 1: 1524345})
    assert one.missing == {1: "NCCL's RAS gets no answer from it"}
    assert list(one.launched) == [0]
    assert one.behind() == {}


def test_a_missing_rank_in_the_json_of_nccl_2_28() -> None:
    """Its text lacks a comma there (jsonWriteMissingRank in src/ras/client_support.cc of 2.28.7 to 2.28.9), so it is no
    JSON just when a rank is missing."""
    right = json.dumps(GUIDE, indent=2)
    wrong = right.replace('"nvml_dev": 1,', '"nvml_dev": 1')
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(wrong)
    assert communicators(wrong) == communicators(wrong.encode()) == communicators(right)


def test_a_rank_that_is_behind() -> None:
    """Ranks that launched fewer collectives than another are named, with both numbers."""
    (one,) = communicators(json.dumps(with_counts(42, 41, 42)))
    assert one.behind() == {1: "it has launched 41 AllReduce, and another rank 42"}


@pytest.mark.parametrize(
    "answer", ["", "Job summary\n", "[]", "{}", '{"communicators": [{"size": 2}]}', '{"communicators": 3}']
)
def test_no_answer_of_ras(answer: str) -> None:
    """Text, nothing, and other JSON are an error that says so."""
    with pytest.raises(ValueError, match=r"no answer of NCCL's RAS|Expecting value"):
        communicators(answer)


def test_it_is_asked_over_its_protocol(service: Service) -> None:
    """Handshake, time limit, format and question, as NCCL's own client sends them."""
    assert ask(service.address) == communicators(json.dumps(GUIDE))
    service.formats = False
    with pytest.raises(ValueError, match=r"NCCL before 2\.28\.7 gives no JSON"):
        ask(service.address)


def test_counts_that_stand_still_are_a_hang(service: Service) -> None:
    """The time counts from the first answer with these counts, and the opinion names the rank that is behind."""
    service.answer = with_counts(42, 41)
    opinion = watched(NcclRas(), lambda seen: seen is not None and seen.quiet_s > 0.6)
    assert opinion.ready
    assert opinion.detail == "rank 1: it has launched 41 AllReduce, and another rank 42"
    assert opinion.ranks == (1,)


def test_counts_that_grow_are_none(service: Service) -> None:
    """With each answer that shows a new collective the quiet time begins anew."""
    observer, made = NcclRas(), 0

    def asked_twice(_seen: Opinion | None) -> bool:
        return service.asked >= enough

    for made in range(5):
        service.answer = with_counts(made, made)
        enough = service.asked + 2
        watched(observer, asked_twice)
    since_s = observer.since_s
    service.answer = with_counts(made + 1, made)
    watched(observer, lambda _seen: observer.since_s > since_s)


def test_a_rank_that_is_stopped_is_named(service: Service) -> None:
    """A rank that RAS does not reach has not launched anything: the time goes on."""
    observer = NcclRas()
    service.answer = with_counts(7, 7)
    watched(observer, lambda seen: seen is not None and seen.quiet_s > 0.0)
    since_s = observer.since_s
    gone = with_counts(7, 7)["communicators"][0]
    service.answer = {
        "communicators": [
            {**gone, "ranks": gone["ranks"][:1], "missing_ranks": GUIDE["communicators"][0]["missing_ranks"]}
        ]
    }
    opinion = watched(observer, lambda seen: seen is not None and bool(seen.detail))
    assert opinion.detail == "rank 1: NCCL's RAS gets no answer from it"
    assert observer.since_s == since_s


def test_another_job_on_the_machine(service: Service) -> None:
    """RAS of the machine's first job holds the port: its answers say nothing of this job."""
    observer, ranks = NcclRas(), [rank(0, 77), rank(1, 78)]
    service.answer = with_counts(42, 41)
    opinion = watched(observer, lambda seen: seen is not None and observer.answered_s > observer.since_s, ranks)
    assert (opinion.ready, opinion.blind) == (False, "NCCL's RAS answers for another job")
    assert observer.words(ranks) == {}  # also in the report of a hang, whose ranks may have the same numbers


def test_a_job_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing answers: there is no opinion, and no event of a blind observer in each run with gloo."""
    with socketserver.TCPServer(("127.0.0.1", 0), _Client) as free:
        monkeypatch.setattr(hang_watch, "ADDRESS", f"127.0.0.1:{free.server_address[1]}")
    observer = NcclRas()
    assert observer.look(time.monotonic(), True, RANKS) is None
    assert observer._asking
    observer._asking.join()
    assert observer.look(time.monotonic(), True, RANKS) is None


def test_nobody_asks_while_the_job_is_well(service: Service) -> None:
    """Without a suspicion of another observer NCCL is left alone."""
    observer = NcclRas()
    assert all(observer.look(time.monotonic(), False, RANKS) is None for _ in range(10))
    assert observer._asking is None
    assert service.asked == 0


def test_ranks_of_a_part_are_known_by_their_pids() -> None:
    """A communicator of two of four ranks: its numbers are not those of the job."""
    observer = NcclRas(communicators(json.dumps(with_counts(3, 2))), since_s=1.0, answered_s=2.0)
    world = [rank(number, pid, 4) for number, pid in ((0, 5), (1, 1524344), (2, 6), (3, 1524345))]
    assert observer.words(world) == {3: "it has launched 2 AllReduce, and another rank 3"}
