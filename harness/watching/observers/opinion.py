"""What an observer says, and the rule by which what four of them say makes a suspicion, or a hang. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# What each looks at: whether the job gets on, or what its processes do. The first two say the same in two ways: a rank
# that writes the first checkpoint of a run is silent and late too. So one of the others has to bear them out.
PROGRESS = frozenset({"log", "collectives"})


@dataclass(frozen=True)
class Opinion:
    """Since `quiet_s` seconds nothing has happened that this observer looks for; the longest such time that came to
    an end by itself was `usual_s`. `armed`: it has seen enough of the job to say anything."""

    observer: str  # log, stacks, metrics, collectives
    quiet_s: float
    usual_s: float
    armed: bool = True
    detail: str = ""


@dataclass(frozen=True)
class Rule:
    """`k` and the floors (seconds) make an observer's bound of what is usual. A hang: two of the four agree, one of
    them about the processes themselves."""

    k: float = 3.0
    floor_s: float = 0.8
    suspect_k: float = 1.5
    suspect_floor_s: float = 0.5

    def bound_s(self, opinion: Opinion, opinions: Iterable[Opinion]) -> float:
        """In pauses that the job is known to make its processes may rest as long."""
        usual = opinion.usual_s
        if opinion.observer not in PROGRESS:
            pauses = [one.usual_s for one in opinions if one.armed and one.observer in PROGRESS]
            usual = max(usual, min(pauses, default=0.0))
        return max(self.floor_s, self.k * usual)

    def suspects(self, opinions: Iterable[Opinion]) -> list[Opinion]:
        return [
            one for one in opinions
            if one.armed and one.quiet_s >= max(self.suspect_floor_s, self.suspect_k * one.usual_s)
        ]  # fmt: skip

    def agree(self, opinions: Sequence[Opinion]) -> list[Opinion]:
        """Those that say it hangs, where they are enough; else none."""
        sure = [one for one in opinions if one.armed and one.quiet_s >= self.bound_s(one, opinions)]
        enough = len(sure) >= 2 and any(one.observer not in PROGRESS for one in sure)
        return sure if enough else []


@dataclass
class Learned:
    """The longest quiet time that came to an end by itself."""

    longest_s: float = 0.0
    since_s: float | None = None  # when something happened last
    events: int = 0
    needed: int = 3  # so many must have been seen before it is armed

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
    """All opinions at one moment; a recorded run of these can be judged again with another rule."""

    at_s: float
    opinions: tuple[Opinion, ...]
    extra: Mapping[str, object] = field(default_factory=dict)
