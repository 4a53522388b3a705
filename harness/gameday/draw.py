"""Draws the whole game day from the seed, before anything is done. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count

from torchaos.harness.gameday.grammar import Arrivals, GameDay, Risk
from torchaos.harness.record.plan import stream

SHORTEST_S = 60.0  # of a round without faults: the start of the job takes a part of it


@dataclass(frozen=True)
class Drawn:
    """One fault of the game day. `at_s`: its time in seconds since the day began."""

    id: str
    at_s: float
    risk: Risk


@dataclass(frozen=True)
class Round:
    """One round. `start_s`, `end_s`: its planned start and end in seconds since the game day began. Each fault comes
    `at_s` - `start_s` seconds after the round's launch."""

    number: int
    start_s: float
    end_s: float
    faults: tuple[Drawn, ...]


def draw(day: GameDay, risks: Sequence[Risk], seed: int) -> list[Drawn]:
    """Every fault of the day, in order of time. Each fault has its own random stream, so a longer day begins with the
    faults of a shorter day. A fault that could not end before the day ends is left out."""
    weights = list(accumulate(risk.weight for risk in risks))
    found = []
    for number, at_s in enumerate(arrivals(day.arrivals, day.duration, stream(seed, "arrivals"))):
        risk = stream(seed, f"fault {number}").choices(risks, cum_weights=weights)[0]
        if at_s + (risk.for_ or 0.0) + day.rest <= day.duration:
            found.append(Drawn(f"f{number:03d}-{risk.inject}", round(at_s, 3), risk))
    return found


def arrivals(when: Arrivals, duration_s: float, random_stream: random.Random) -> Iterator[float]:
    """The times at which faults come, in seconds since the game day began, up to its end."""
    if when.trace is not None:
        gaps: Iterator[float] = iter([b - a for a, b in zip([0.0, *when.trace], when.trace, strict=False)])
    elif when.every is not None:
        gaps = (when.every for _ in count())
    else:
        mean = when.mtbf or duration_s
        gaps = (random_stream.expovariate(1 / mean) for _ in count())
    for at_s in accumulate(gaps):
        if at_s > duration_s:
            return
        yield at_s


def cut(day: GameDay, faults: Sequence[Drawn]) -> list[Round]:
    """Divides the day into rounds, without a gap between them. A new round begins after some number of faults or some
    time. A round without faults trains for its whole length. If only a short time without faults is left in the end,
    the round before lasts until then."""
    found: list[Round] = []
    start_s, mine = 0.0, list[Drawn]()

    def end(end_s: float) -> None:
        nonlocal start_s, mine
        found.append(Round(len(found), start_s, end_s, tuple(mine)))
        start_s, mine = end_s, []

    for fault in faults:
        while fault.at_s - start_s > day.round.length:
            end(start_s + day.round.length)
        mine.append(fault)
        if len(mine) == day.round.faults:
            end(fault.at_s)
    while day.duration - start_s > day.round.length:
        end(start_s + day.round.length)
    if mine or not found or day.duration - start_s >= SHORTEST_S:
        end(day.duration)
    return [*found[:-1], replace(found[-1], end_s=day.duration)]
