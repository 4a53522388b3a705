"""Asks the observers ten times a second, and emits events: for each change of an opinion, for a suspicion, and for a
hang with its culprits.

One observer asks NCCL's own health service, RAS (reliability, availability, serviceability), once a second, and only
while another observer suspects a hang, because NCCL may need seconds for an answer. A thread of NCCL in each rank
answers on a TCP port of the machine. RAS counts the collectives that each rank of each communicator has launched, and
reports the ranks that it can't reach. It knows nothing of torchaos, so it is an outside witness. Answers in JSON exist
from NCCL 2.28.7 on. Protocol and format: NCCL's user guide, chapter RAS, and its src/ras/client.cc and
client_support.cc (read at 2.30.7)."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchaos.harness.host import processes
from torchaos.harness.interfaces import Emit, Need, RankProcess
from torchaos.harness.monitoring.diagnosis import live_job
from torchaos.harness.monitoring.diagnosis.diagnosis import LOW
from torchaos.harness.monitoring.diagnosis.live_job import find_py_spy
from torchaos.harness.monitoring.observers.hang_detectors import (
    KernelSleeps,
    LogSilence,
    Opinion,
    Overdue,
    Rule,
    Stagnation,
    Tick,
)
from torchaos.harness.monitoring.observers.resource_use import Idle, awaited, spinning
from torchaos.harness.monitoring.probes.gpu_probe import Sample
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir

ADDRESS = "localhost:28028"  # where RAS answers, unless NCCL_RAS_ADDR of the job gives another address
_EVERY_S, _TIMEOUT_S, _MOST_BYTES = 1.0, 2, 64 << 20
_NO_COMMA = re.compile(r'("nvml_dev": -?\d+)(?=\s+"status")')  # NCCL 2.28 leaves a comma out for a missing rank
_UNTIL_SUSPECTED_S = 0.5  # the quiet time in seconds after which other observers suspect a hang


@dataclass(frozen=True)
class Communicator:
    """The answer of RAS about an NCCL communicator. Ranks are those of the communicator. `launched`: by rank, the
    number of launched collectives of each function. `missing`: by rank, why RAS has no answer from it."""

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
            return Opinion(self.name, 0.0, 0.0, ready=False, blind=self.problem)
        if not self.found:
            return None
        if not self._own(ranks):
            return Opinion(self.name, 0.0, 0.0, ready=False, blind="NCCL's RAS answers for another job")
        still_s = self.answered_s - self.since_s
        quiet_s = still_s + _UNTIL_SUSPECTED_S if still_s > 0 else 0.0
        told = self.words(ranks)
        detail = "; ".join(f"rank {rank}: {told[rank]}" for rank in sorted(told))
        return Opinion(self.name, quiet_s, 0.0, ready=True, detail=detail, ranks=tuple(sorted(told)))

    def words(self, ranks: Sequence[RankProcess]) -> dict[int, str]:
        """The problems of single ranks of this job in the last answer: RAS can't reach them, or they have launched
        fewer collectives than others. The second is left out unless the counts stood still, because counts always
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


_SILENT_START_S = 30.0  # after this time, a job without output counts as training
_LATE_S = 1.0  # after a longer time without a look, as on a busy machine, quiet times are not learned
_LINES = 5  # a job whose log has grown more often than this counts as training


class HangWatch:
    """A probe that declares hangs. `ranks`: returns the live ranks. `logs`: returns the files of the job's output.
    `stamps`: the folder of the agent's stamps; None without an agent. `record`: receives all opinions. `gpus`: returns
    the newest samples of each GPU. `py_spy`: finds the program that reads stacks."""

    period_s = 0.1

    def __init__(
        self, ranks: Callable[[], Mapping[int, RankProcess]], logs: Callable[[], Sequence[Path]],
        stamps: Path | None, record: Callable[[Tick], None] | None = None,
        gpus: Callable[[], Mapping[int, Sequence[Sample]]] = dict, py_spy: Callable[[], str | None] = find_py_spy,
    ) -> None:  # fmt: skip
        self._ranks, self._logs, self._stamps, self._record, self._gpus = ranks, logs, stamps, record, gpus
        self._py_spy = py_spy
        self._rule = Rule()
        self._pids: set[int] = set()
        self._looked_s = 0.0
        self._said: dict[str, str] = {}  # the last opinion of each observer that was recorded, in a word
        self._most = 0  # the most ranks that were seen at once; ranks on other machines are never seen
        self._reset(0.0)

    def _reset(self, now_s: float) -> None:
        """Forgets everything that was learned, because the processes have changed."""
        self._log, self._idle, self._stacks = LogSilence(self._logs), Idle(), Stagnation(self._py_spy)
        self._ras, self._kernel = NcclRas(), KernelSleeps()
        self._overdue = Overdue(self._stamps) if self._stamps else None
        self._since_s, self._suspected, self._declared = now_s, False, False
        self._lines, self._size = 0, -1

    def sample(self, emit: Emit) -> None:
        ranks = list(self._ranks().values())
        now = time.monotonic()
        pids = {rank.pid for rank in ranks}
        if pids != self._pids:
            self._pids = pids
            self._reset(now)
        world, self._most = max((rank.world_size for rank in ranks), default=0), max(self._most, len(ranks))
        if not ranks or len(ranks) < min(world, self._most):  # the job starts, ends or restarts
            return
        opinions = self._look(now, ranks, now - self._looked_s < _LATE_S)
        self._looked_s = time.monotonic()
        if self._record:
            self._record(Tick(now, tuple(opinions)))
        self._tell(opinions, emit, ranks, now)

    def _look(self, now: float, ranks: Sequence[RankProcess], in_time: bool) -> list[Opinion]:
        training = self._is_training(now)
        learns = training and in_time
        opinions = [self._log.look(now, learns)]
        if self._overdue:
            opinions.append(self._overdue.look(now, learns))
        metrics = self._idle.look(now, learns, ranks, late=bool(self._rule.suspects(opinions)))
        opinions.append(metrics)
        if not training:
            return []
        wanted = bool(self._rule.suspects(opinions))
        working = metrics.quiet_s < 0.3
        opinions.append(self._stacks.look(now, wanted, working, ranks))
        asked = (self._ras.look(now, wanted, ranks), self._kernel.look(wanted, ranks))
        return [*opinions, *filter(None, asked)]

    def _is_training(self, now: float) -> bool:
        if self._overdue and self._overdue.training:
            return True
        size = sum(path.stat().st_size for path in self._logs() if path.exists())
        self._lines += size != self._size
        self._size = size
        return self._lines > _LINES or now - self._since_s > _SILENT_START_S

    def _tell(self, opinions: Sequence[Opinion], emit: Emit, ranks: Sequence[RankProcess], now: float) -> None:
        for opinion in opinions:
            if self._said.get(opinion.observer) != (word := self._rule.word(opinion, opinions)):
                self._said[opinion.observer] = word
                emit(Kind.HANG_OPINION, {"opinion": word, **self._values(opinion, opinions)})
        suspects = self._rule.suspects(opinions)
        if not suspects:
            self._suspected = self._declared = False
            return
        if not self._suspected:
            self._suspected = True
            first = max(suspects, key=lambda opinion: opinion.quiet_s)
            data = {"observer": first.observer, "ranks": [], "since_s": now - first.quiet_s, "detail": first.detail}
            emit(Kind.HANG_SUSPECTED, data)
        agreed = self._rule.agree(opinions)
        if agreed and not self._declared:
            self._declared = True
            since = now - max(opinion.quiet_s for opinion in agreed)
            by_rank = {rank.rank: rank for rank in ranks}
            diagnosis = live_job.diagnose(by_rank, stamps=self._stamps, hangs=True, py_spy=self._py_spy)
            told = (*self._ras.words(ranks).items(), *self._kernel.words().items())
            for rank, words in (*spinning(self._gpus(), since), *told):
                diagnosis.say(rank, words)
            if not diagnosis.culprits:
                for rank, words in awaited(self._gpus(), since):
                    diagnosis.blame([rank], LOW, words)
            found = diagnosis.to_json()
            emit(Kind.HANG_DECLARED, {
                "observers": sorted(sure.observer for sure in agreed), "ranks": found["culprits"], "since_s": since,
                "declared_s": now, "bound_s": max(self._rule.bound_s(sure, opinions) for sure in agreed), **found,
                "opinions": [self._values(opinion, opinions) for opinion in opinions],
            })  # fmt: skip

    def _values(self, opinion: Opinion, opinions: Sequence[Opinion]) -> dict[str, Any]:
        """An opinion as data of an event; times in seconds."""
        return {
            "observer": opinion.observer, "quiet_s": round(opinion.quiet_s, 3),
            "bound_s": round(self._rule.bound_s(opinion, opinions), 3), "detail": opinion.blind or opinion.detail,
            **({"ranks": list(opinion.ranks)} if opinion.ranks else {}),
        }  # fmt: skip


class Watching:
    """Runs the probe in a thread of its own. Does nothing if there is no probe."""

    def __init__(self, probe: HangWatch | None, emit: Emit) -> None:
        self._probe, self._emit = probe, emit
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hangs", daemon=True)
        self._noted: set[str] = set()
        self.cpu_s = 0.0  # CPU seconds of the thread, without the programs that it starts (py-spy, ss)

    def start(self) -> None:
        if self._probe:
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def _run(self) -> None:
        while self._probe and not self._ended.wait(self._probe.period_s):
            try:
                self._probe.sample(self._emit)
            except (OSError, ValueError, KeyError) as error:  # a process or file has just disappeared
                if not self._ended.is_set():
                    self._note(f"the hang observers missed a look: {type(error).__name__}: {error}")
            self.cpu_s = time.thread_time()

    def _note(self, text: str) -> None:
        if text not in self._noted and len(self._noted) < 5:
            self._noted.add(text)
            self._emit(Kind.NOTE, {"text": text})


def hangs_of(
    plan: Plan, folder: RunDir, ranks: Callable[[], Mapping[int, RankProcess]], emit: Emit,
    gpus: Callable[[], Mapping[int, Sequence[Sample]]],
) -> Watching:  # fmt: skip
    """The hang observers of a run. They do nothing if no assertion needs them."""
    if Need.HANGS not in plan.collect:
        return Watching(None, emit)
    stamps = None if plan.job.attached else folder.stamps
    return Watching(HangWatch(ranks, lambda: sorted(folder.logs.glob("*.log")), stamps, gpus=gpus), emit)
