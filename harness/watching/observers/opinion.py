"""The opinion of an observer, and the rule that combines the opinions of all observers into a suspicion or a hang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# These observers look at the progress of the job, the others at its processes. They often err together: a rank that
# writes the first checkpoint of a run neither logs nor calls collectives. So another observer has to confirm a hang.
PROGRESS = frozenset({"log", "collectives", "nccl-ras"})


@dataclass(frozen=True)
class Opinion:
    """The report of one observer. For `quiet_s` seconds it has seen no activity. `usual_s`: the longest such time so
    far that ended by itself. `armed`: the observer has seen enough of the job to have an opinion. `blind`: why it can't
    see anything at present; empty if it can."""

    observer: str  # log, stacks, metrics, collectives, nccl-ras
    quiet_s: float
    usual_s: float
    armed: bool = True
    detail: str = ""
    blind: str = ""
    ranks: tuple[int, ...] = ()  # those that it names in its detail, if it can tell ranks apart


@dataclass(frozen=True)
class Rule:
    """The rule by which observers suspect and declare a hang. Two must agree, and at least one of the two
    must watch the processes. A bound is k times the usual quiet time, but at least the floor, in seconds."""

    k: float = 3.0
    floor_s: float = 0.8
    suspect_k: float = 1.5
    suspect_floor_s: float = 0.5

    def bound_s(self, opinion: Opinion, opinions: Iterable[Opinion]) -> float:
        """The quiet time in seconds above which this observer reports a hang. For observers of processes, the usual
        quiet time is at least the usual pause in the job's progress, because processes may be idle during a pause."""
        usual = opinion.usual_s
        if opinion.observer not in PROGRESS:
            pauses = [other.usual_s for other in opinions if other.armed and other.observer in PROGRESS]
            usual = max(usual, min(pauses, default=0.0))
        return max(self.floor_s, self.k * usual)

    def suspects(self, opinions: Iterable[Opinion]) -> list[Opinion]:
        return [
            opinion for opinion in opinions
            if opinion.armed and opinion.quiet_s >= max(self.suspect_floor_s, self.suspect_k * opinion.usual_s)
        ]  # fmt: skip

    def word(self, opinion: Opinion, opinions: Iterable[Opinion]) -> str:
        """What the observer says: blind, learning, active, suspects or hangs."""
        if opinion.blind or not opinion.armed:
            return "blind" if opinion.blind else "learning"
        if opinion.quiet_s >= self.bound_s(opinion, opinions):
            return "hangs"
        return "suspects" if self.suspects([opinion]) else "active"

    def agree(self, opinions: Sequence[Opinion]) -> list[Opinion]:
        """The opinions that report a hang, if there are enough of them to declare a hang. Otherwise none."""
        sure = [opinion for opinion in opinions if opinion.armed and opinion.quiet_s >= self.bound_s(opinion, opinions)]
        enough = len(sure) >= 2 and any(opinion.observer not in PROGRESS for opinion in sure)
        return sure if enough else []


@dataclass
class Learned:
    """Learns the longest quiet time that ended by itself."""

    longest_s: float = 0.0
    since_s: float | None = None  # when something last happened, CLOCK_MONOTONIC
    events: int = 0
    needed: int = 3  # events that must be seen before the observer is armed

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
    """All opinions at one time. A recorded sequence can be judged again with another rule."""

    at_s: float
    opinions: tuple[Opinion, ...]
    extra: Mapping[str, object] = field(default_factory=dict)
