"""The observer of NCCL's own health service, RAS (reliability, availability, serviceability). A thread of NCCL in each
rank answers on a TCP port of the machine. RAS counts the collectives that each rank of each communicator has launched,
and reports the ranks that it can't reach. It knows nothing of torchaos, so it is an outside witness.

RAS is asked only while another observer suspects a hang, once a second, because an answer can take NCCL seconds.
Answers in JSON exist from NCCL 2.28.7 on. Protocol and format: NCCL's user guide, chapter RAS, and its
src/ras/client.cc and client_support.cc (read at 2.30.7)."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchaos.harness.host import processes
from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.observers.opinions import Opinion

ADDRESS = "localhost:28028"  # where RAS answers, unless NCCL_RAS_ADDR of the job gives another address
_EVERY_S, _TIMEOUT_S, _MOST_BYTES = 1.0, 2, 64 << 20
_NO_COMMA = re.compile(r'("nvml_dev": -?\d+)(?=\s+"status")')  # NCCL 2.28 leaves a comma out for a missing rank
_UNTIL_SUSPECTED_S = 0.5  # the quiet time in seconds after which other observers suspect a hang


@dataclass(frozen=True)
class Communicator:
    """What RAS knows of an NCCL communicator. Ranks are those of the communicator. `launched`: by rank, the number of
    launched collectives of each function. `missing`: by rank, why RAS has no answer of it."""

    size: int
    pids: Mapping[int, int]  # by rank
    launched: Mapping[int, Mapping[str, int]]
    missing: Mapping[int, str]

    def behind(self) -> dict[int, str]:
        """The ranks that have launched fewer collectives of a function than another rank, each with a clause."""
        most = Counter[str]()
        for counts in self.launched.values():
            most |= Counter(counts)
        return {
            rank: f"it has launched {counts.get(name, 0)} {name}, and another rank {most[name]}"
            for rank, counts in self.launched.items()
            for name in sorted(most, reverse=True) if counts.get(name, 0) < most[name]
        }  # fmt: skip


def ask(address: str = ADDRESS) -> list[Communicator]:
    """The communicators of the job whose RAS answers at `address` (host:port). May take some seconds if a rank does not
    respond. Raises OSError if nothing answers, ValueError if the answer is not the JSON of NCCL 2.28.7 or later."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]") or "localhost", int(port)), _TIMEOUT_S) as connection:
        # If ranks do not respond, RAS may wait for two rounds of its own before it answers without them.
        connection.settimeout(5 * _TIMEOUT_S)
        with connection.makefile("rwb") as stream:
            for command in ("CLIENT PROTOCOL 2", f"TIMEOUT {_TIMEOUT_S}", "SET FORMAT json"):
                stream.write(command.encode() + b"\n")
                stream.flush()
                said = stream.readline(1024).decode(errors="replace").strip()
                if said != "OK" and not said.upper().startswith("SERVER PROTOCOL"):
                    raise ValueError(f"{command!r} was answered by {said!r}: NCCL before 2.28.7 gives no JSON")
            stream.write(b"STATUS\n")
            stream.flush()
            return communicators(stream.read(_MOST_BYTES))


def communicators(answer: bytes | str) -> list[Communicator]:
    """The communicators in an answer of RAS. Raises ValueError if it is not such an answer."""
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else answer
    raw = json.loads(_NO_COMMA.sub(r"\1,", text))
    try:
        return [_communicator(one) for one in raw["communicators"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no answer of NCCL's RAS: {type(error).__name__}: {error}") from error


def _communicator(raw: Mapping[str, Any]) -> Communicator:
    there, missing = raw["ranks"], raw["missing_ranks"]
    return Communicator(
        size=int(raw["size"]),
        pids={int(one["rank"]): int(one["pid"]) for one in (*there, *missing)},
        launched={int(one["rank"]): dict(one["collective_counts"]) for one in there},
        missing={int(one["rank"]): _why(one["status"]) for one in missing},
    )


def _why(status: Mapping[str, bool]) -> str:
    if status.get("considered_dead"):
        return "NCCL's RAS takes it for dead"
    return "NCCL's RAS gets no answer from it" if status.get("unresponsive") else "it is not in the communicator"


@dataclass
class NcclRas:
    """Asks RAS repeatedly, and learns whether the counts grow. Has no opinion if no service answers."""

    name = "nccl-ras"
    found: list[Communicator] = field(default_factory=list)
    since_s: float = 0.0  # the counts have not changed since this time, CLOCK_MONOTONIC
    answered_s: float = 0.0
    problem: str = ""
    _asking: threading.Thread | None = None
    _asked_s: float = 0.0

    def look(self, now_s: float, wanted: bool, ranks: Sequence[RankProcess]) -> Opinion | None:
        """For how long no rank has launched a collective. `wanted`: another observer suspects a hang. None if
        `wanted` is False or no service answers."""
        if not wanted:
            self.found, self.problem, self.since_s = [], "", 0.0
            return None
        if now_s - self._asked_s >= _EVERY_S and not (self._asking and self._asking.is_alive()):
            self._asked_s = now_s
            self._asking = threading.Thread(target=self._ask, args=(_address(ranks),), name="nccl-ras", daemon=True)
            self._asking.start()
        if self.problem:
            return Opinion(self.name, 0.0, 0.0, armed=False, blind=self.problem)
        if not self.found:
            return None
        if not self._own(ranks):
            return Opinion(self.name, 0.0, 0.0, armed=False, blind="NCCL's RAS answers for another job")
        still_s = self.answered_s - self.since_s
        quiet_s = still_s + _UNTIL_SUSPECTED_S if still_s > 0 else 0.0
        told = self.words(ranks)
        detail = "; ".join(f"rank {rank}: {told[rank]}" for rank in sorted(told))
        return Opinion(self.name, quiet_s, 0.0, armed=True, detail=detail, ranks=tuple(sorted(told)))

    def words(self, ranks: Sequence[RankProcess]) -> dict[int, str]:
        """What the last answer says about single ranks of this job: that RAS can't reach them, or that they have
        launched fewer collectives than others. The second is said only if the counts stood still, because they always
        differ while a job trains."""
        numbers = {rank.own_pid: rank.rank for rank in ranks}
        world = max((rank.world_size for rank in ranks), default=0)
        still = self.answered_s > self.since_s
        told: dict[int, str] = {}
        for one in self._own(ranks):
            for place, words in {**(one.behind() if still else {}), **one.missing}.items():
                number = place if one.size == world else numbers.get(one.pids.get(place, 0))
                if number is not None:
                    told.setdefault(number, words)
        return told

    def _own(self, ranks: Sequence[RankProcess]) -> list[Communicator]:
        """The communicators with a rank of this job. The service that answers may belong to another job."""
        pids = {rank.own_pid for rank in ranks}
        return [one for one in self.found if pids & set(one.pids.values())]

    def _ask(self, address: str) -> None:
        try:
            found = ask(address)
        except ConnectionRefusedError:
            return  # no NCCL job, or RAS is switched off
        except (OSError, ValueError) as error:
            self.problem = f"NCCL's RAS at {address}: {error}"
            return
        now_s = time.monotonic()
        if not self.since_s or grew(self.found, found):
            self.since_s = now_s
        self.found, self.answered_s, self.problem = found, now_s, ""


def grew(before: Sequence[Communicator], after: Sequence[Communicator]) -> bool:
    """Whether a rank has launched a collective between two answers. A rank that no longer answers does not count."""
    counts = [{(one.pids[rank], rank, one.size): made for rank, made in one.launched.items()} for one in before]
    return any(
        (one.pids[rank], rank, one.size) in known and known[one.pids[rank], rank, one.size] != made
        for known, one in zip(counts, after, strict=False) for rank, made in one.launched.items()
    )  # fmt: skip


def _address(ranks: Sequence[RankProcess]) -> str:
    """The address of the RAS of this job: NCCL_RAS_ADDR in the environment of a rank, or NCCL's default."""
    for rank in ranks:
        _line, environ = processes.image(rank.pid) or (b"", b"")
        for entry in environ.split(b"\0"):
            if entry.startswith(b"NCCL_RAS_ADDR="):
                return entry.partition(b"=")[2].decode(errors="replace")
    return ADDRESS
