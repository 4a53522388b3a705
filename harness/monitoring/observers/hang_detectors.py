"""The opinions of the observers of a hang, and the rule that combines them into a suspicion or a hang. Four observers
are here; the others are in resource_use.py and hang_watch.py.

`LogSilence`: the job's log has not grown for longer than usual.

`Stagnation`: the stacks of all ranks do not change. It reads stacks only while another observer suspects a hang,
because each time costs about 20 ms of CPU per rank. A rank may work in a single call for a long time; so while a rank
uses the CPU, only a tenth of the time counts.

`Overdue`: by the agent's stamps, a collective takes longer than its bound, or no rank begins or ends a collective.

`KernelSleeps`: the kernel's tracepoints show (by bpftrace) that a rank sleeps without a break where no signal ends it,
as with a dead disk. In /proc, many short reads look the same. It is asked only while another observer suspects a hang,
because it takes bpftrace a second to attach."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchaos.harness.interfaces import ChaosError, RankProcess
from torchaos.harness.monitoring.diagnosis import kernel_trace
from torchaos.harness.monitoring.diagnosis.kernel_trace import Wait
from torchaos.harness.monitoring.diagnosis.live_job import Stack, find_py_spy, sample
from torchaos.harness.protocol import collective_stamps

# These observers watch the progress of the job; the others watch its processes. The observers of progress often err
# together: a rank that writes the first checkpoint of a run neither logs nor calls collectives, and sleeps in the
# kernel. So an observer of processes has to confirm a hang.
PROGRESS = frozenset({"log", "collectives", "nccl-ras", "kernel"})


@dataclass(frozen=True)
class Opinion:
    """The report of one observer: it has seen no activity for `quiet_s` seconds. `usual_s`: the longest quiet time so
    far that ended with new activity. `ready`: whether the observer has seen enough of the job to have an opinion.
    `blind`: why it can't see anything at present; empty if it can."""

    observer: str  # log, stacks, metrics, collectives, nccl-ras, kernel
    quiet_s: float
    usual_s: float
    ready: bool = True
    detail: str = ""
    blind: str = ""
    ranks: tuple[int, ...] = ()  # the ranks that `detail` names, if the observer can tell ranks apart


@dataclass(frozen=True)
class Rule:
    """The rule by which observers suspect and declare a hang. Two observers must agree, and at least one of them must
    watch the processes. The bound for a quiet time is `k` times the usual quiet time, but at least `floor_s` seconds.
    For a suspicion, both numbers are smaller."""

    k: float = 3.0
    floor_s: float = 0.8
    suspect_k: float = 1.5
    suspect_floor_s: float = 0.5

    def bound_s(self, opinion: Opinion, opinions: Iterable[Opinion]) -> float:
        """The quiet time in seconds above which this observer reports a hang. For an observer of processes, the usual
        quiet time is at least the usual pause in the job's progress, because processes may be idle in a pause."""
        usual = opinion.usual_s
        if opinion.observer not in PROGRESS:
            learned = (other for other in opinions if other.ready and other.usual_s)
            usual = max(usual, min((other.usual_s for other in learned if other.observer in PROGRESS), default=0.0))
        return max(self.floor_s, self.k * usual)

    def suspects(self, opinions: Iterable[Opinion]) -> list[Opinion]:
        return [
            opinion for opinion in opinions
            if opinion.ready and opinion.quiet_s >= max(self.suspect_floor_s, self.suspect_k * opinion.usual_s)
        ]  # fmt: skip

    def word(self, opinion: Opinion, opinions: Iterable[Opinion]) -> str:
        """The state of the observer in a word: blind, learning, active, suspects or hangs."""
        if opinion.blind or not opinion.ready:
            return "blind" if opinion.blind else "learning"
        if opinion.quiet_s >= self.bound_s(opinion, opinions):
            return "hangs"
        return "suspects" if self.suspects([opinion]) else "active"

    def agree(self, opinions: Sequence[Opinion]) -> list[Opinion]:
        """The opinions that report a hang, if they are enough to declare it. Otherwise empty."""
        sure = [opinion for opinion in opinions if opinion.ready and opinion.quiet_s >= self.bound_s(opinion, opinions)]
        enough = len(sure) >= 2 and any(opinion.observer not in PROGRESS for opinion in sure)
        return sure if enough else []


@dataclass
class Learned:
    """Learns the longest quiet time that ended with new activity."""

    longest_s: float = 0.0
    since_s: float | None = None  # when something last happened, CLOCK_MONOTONIC
    events: int = 0
    needed: int = 3  # events that must be seen before the observer is ready

    def happened(self, now_s: float, counts: bool = True) -> None:
        if self.since_s is not None and counts:
            self.longest_s = max(self.longest_s, now_s - self.since_s)
        self.since_s = now_s
        self.events += counts

    def opinion(self, observer: str, now_s: float, detail: str = "") -> Opinion:
        quiet = 0.0 if self.since_s is None else now_s - self.since_s
        return Opinion(observer, quiet, self.longest_s, self.events >= self.needed, detail)


@dataclass(frozen=True)
class Tick:
    """All opinions at one time. A recorded sequence of them can be judged again with another rule."""

    at_s: float
    opinions: tuple[Opinion, ...]


class LogSilence:
    """Learns how often the log grows. `paths`: returns the present log files. Lines from before the training do not
    count."""

    name = "log"

    def __init__(self, paths: Callable[[], Sequence[Path]]) -> None:
        self._paths, self._size = paths, -1
        self._learned = Learned(needed=5)

    def look(self, now_s: float, training: bool) -> Opinion:
        paths = [path for path in self._paths() if path.exists()]
        if not paths:
            return Opinion(self.name, 0.0, 0.0, ready=False, blind="there is no log")
        size = sum(path.stat().st_size for path in paths)
        if size != self._size:
            self._size = size
            self._learned.happened(now_s, training)
        return self._learned.opinion(self.name, now_s)


_EVERY_S = 0.2
_BUSY = 10.0


@dataclass
class _Seen:
    """A stack that was the same in all looks from `since_s` to `until_s`, CLOCK_MONOTONIC."""

    stack: Stack
    since_s: float
    until_s: float


class Stagnation:
    """Watches whether the stacks change. Blind without py-spy, and until it has read the stacks of all ranks."""

    name = "stacks"

    def __init__(self, py_spy: Callable[[], str | None] = find_py_spy) -> None:
        self._py_spy = py_spy()
        self._seen: dict[int, _Seen] = {}  # by pid
        self._looked_s = 0.0

    def look(self, now_s: float, wanted: bool, working: bool, ranks: Sequence[RankProcess]) -> Opinion:
        """For how long no stack has changed. `wanted`: whether another observer suspects a hang. `working`: whether a
        rank uses the CPU or the disk."""
        if not self._py_spy:
            return Opinion(self.name, 0.0, 0.0, ready=False, blind="py-spy is not installed")
        if not wanted:
            self._seen.clear()
            return Opinion(self.name, 0.0, 0.0, ready=False)
        if now_s - self._looked_s >= _EVERY_S:
            self._looked_s = now_s
            self._sample([rank.pid for rank in ranks], self._py_spy)
        if unread := sorted(rank.rank for rank in ranks if rank.pid not in self._seen):
            return Opinion(self.name, 0.0, 0.0, ready=False, blind=f"py-spy can't read the stacks of ranks {unread}")
        quiet = min(seen.until_s - seen.since_s for seen in self._seen.values())
        # This observer starts when the others suspect a hang, which is after half a second of quiet.
        quiet = quiet / _BUSY if working else (quiet + 0.5 if quiet >= 2 * _EVERY_S else 0.0)
        detail = "; ".join(f"rank {rank.rank} at {self._seen[rank.pid].stack.place}" for rank in ranks)
        return Opinion(self.name, quiet, 0.0, ready=True, detail=detail)

    def _sample(self, pids: Sequence[int], py_spy: str) -> None:
        """Reads all stacks. On a busy machine this takes long, and some stacks may not be read. A stack that was not
        read counts as unchanged only up to the time when it was read last."""
        begun_s = time.monotonic()
        found = sample(pids, py_spy)
        for pid, stack in found.items():
            seen = self._seen.get(pid)
            if seen is None or seen.stack != stack:
                self._seen[pid] = _Seen(stack, time.monotonic(), begun_s)
            else:
                seen.until_s = begun_s


_RING = collective_stamps.SIZE - collective_stamps.SLOTS * 64
_AT_START_S = 10.0
_NUMBER, _BEGUN, _ENDED, _STEP = 0, 4, 6, 7  # words of an entry


class Overdue:
    """Learns how long collectives take, and for how long no collective begins or ends. The first steps do not count."""

    name = "collectives"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, int] = {}  # the newest time in each file, nanoseconds
        self._longest_s = 0.0
        self._quiet = Learned(needed=10)
        self.training = False  # whether a step was completed

    def look(self, now_s: float, training: bool) -> Opinion:
        """The stronger of two opinions: about the oldest open collective, and about the time in which no collective
        began or ended. `now_s`: CLOCK_MONOTONIC. `training`: whether quiet times that are seen now count as usual."""
        oldest_s, newest, active = now_s, 0, False
        files = {path: words for path in self._files() if (words := _read(path))}
        for path, words in files.items():
            numbers, begun, ended = words[_NUMBER::8], words[_BEGUN::8], words[_ENDED::8]
            steps = words[_STEP::8]
            self.training = self.training or max(steps) >= 2
            last = max(max(begun), max(ended))
            before = self._seen.get(path, 0)
            if last > before:
                active, self._seen[path] = True, last
                self._learn(begun, ended, steps, before)
            newest = max(newest, last)
            open_ = [
                start
                for number, start, end in zip(numbers, begun, ended, strict=True)
                if number > 0 and start and not end
            ]
            oldest_s = min([oldest_s, *(start / 1e9 for start in open_)])
        self._seen = {path: last for path, last in self._seen.items() if path in files}
        if active:
            self._quiet.happened(now_s, self.training and training)
        age = Opinion(self.name, now_s - oldest_s, self._usual_s, True, "a collective is open all this time")
        quiet = self._quiet.opinion(self.name, now_s, "no collective began or ended")
        return max(age, quiet, key=lambda opinion: opinion.quiet_s / max(1.0, opinion.usual_s))

    @property
    def _usual_s(self) -> float:
        """How long collectives take. At the start it is at least _AT_START_S, because the ranks may wait in a
        collective for a rank that prepares something."""
        return max(self._longest_s, 0.0 if self._quiet.events >= self._quiet.needed else _AT_START_S)

    def _learn(self, begun: tuple[int, ...], ended: tuple[int, ...], steps: tuple[int, ...], since: int) -> None:
        took = [end - start for start, end, step in zip(begun, ended, steps, strict=True) if end > since and step >= 2]
        self._longest_s = max([self._longest_s, *(nanoseconds / 1e9 for nanoseconds in took)])

    def _files(self) -> list[Path]:
        """The stamp files of the latest attempt."""
        found = sorted(self._folder.glob("*.stamps"))
        attempts = {path: path.name.split("-")[1] for path in found if path.name.count("-") == 2}
        last = max(attempts.values(), key=lambda text: int(text[1:]) if text[1:].isdigit() else 0, default="")
        return [path for path, attempt in attempts.items() if attempt == last]


def _read(path: Path) -> tuple[int, ...] | None:
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if len(raw) != collective_stamps.SIZE:
        return None
    return struct.unpack_from(f"{collective_stamps.SLOTS * 8}q", raw, _RING)


_LOOK_S = 1.0
_LONG_S = 0.8 * _LOOK_S  # shorter sleeps may be reads of a slow disk


@dataclass
class KernelSleeps:
    """Looks for ranks that sleep in the kernel. Has no opinion without root or bpftrace, or if no rank sleeps long.
    `watch`: how the ranks (pid by rank) are observed for some seconds."""

    name = "kernel"
    watch: Callable[[Mapping[int, int], float], Sequence[Wait]] = kernel_trace.watch
    missing: Callable[[], str | None] = kernel_trace.missing
    problem: str = ""
    _asleep: tuple[Wait, ...] = ()
    _looking: threading.Thread | None = field(default=None, repr=False)

    def look(self, wanted: bool, ranks: Sequence[RankProcess]) -> Opinion | None:
        """For how long a rank has been asleep, at least. `wanted`: whether another observer suspects a hang."""
        if not wanted:
            self._asleep, self.problem = (), ""
            return None
        if self.problem:
            return Opinion(self.name, 0.0, 0.0, ready=False, blind=self.problem)
        if not (self._looking and self._looking.is_alive()) and not self.missing():
            pids = {rank.rank: rank.pid for rank in ranks}
            self._looking = threading.Thread(target=self._ask, args=(pids,), name="kernel")  # some seconds
            self._looking.start()
        if not self._asleep:
            return None
        longest_s = max(wait.longest_s for wait in self._asleep)
        asleep = tuple(wait.rank for wait in self._asleep)
        return Opinion(self.name, longest_s, 0.0, detail="; ".join(map(str, self._asleep)), ranks=asleep)

    def words(self) -> dict[int, str]:
        """The result of the last look, as a clause by rank."""
        return {wait.rank: f"the kernel saw it {wait.what} for {wait.longest_s:.2f} s" for wait in self._asleep}

    def _ask(self, pids: Mapping[int, int]) -> None:
        try:
            seen = self.watch(pids, _LOOK_S)
        except (OSError, ChaosError) as error:
            self.problem = str(error)
            return
        self._asleep = tuple(wait for wait in seen if wait.longest_s >= _LONG_S)
