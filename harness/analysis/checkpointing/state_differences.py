"""Puts into words which parts of the state were not restored."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torchaos.harness.analysis.claims import said
from torchaos.harness.record.plan import numbered

MOMENTS, RNG, INPUTS, TRAINED, MODES = "moments", "rng", "inputs", "trained", "modes"
_MOST = 4


@dataclass(frozen=True)
class Other:
    """A part of the state that was not restored."""

    quantity: str  # one of snapshots.QUANTITIES, RNG, INPUTS, TRAINED or MODES
    name: str
    ranks: tuple[int, ...]
    holds: str  # what it is instead, as a clause in the plural
    equal: tuple[int, ...] = ()  # the ranks on which it is what it was
    trained: bool = False  # it is among `frozen` only because no optimizer of torch's trains it

    @property
    def part(self) -> tuple[str, str, tuple[int, ...]]:
        return self.quantity, self.name, self.ranks

    @property
    def of(self) -> str:
        """The name used in messages. For a moment: its parameter; for an input: the argument; otherwise the part's own
        name."""
        if self.quantity == INPUTS:  # such as .0.1, the second positional argument, or .1.mask, a keyword argument
            return f"(argument {self.name.split('.', 2)[-1]})"
        if self.quantity == MODES:  # the name of the outermost module is empty, or ends with a colon
            return self.name.rstrip(":") or "of the model"
        return self.name.partition("/")[0] if self.quantity == MOMENTS else self.name


# How optimizers call their moments: those of torch, and of scripts.
_MOMENTS = re.compile(r"^(?:\w*(?:exp_avg|momentum|moment|avg|sum|acc|buf|state|step)\w*|[a-z]{1,2}|\d+)$", re.I)


def of_optimizer(others: Sequence[Other]) -> str:
    """The word for these parts of an optimizer's state: "moments", or the attribute of an optimizer of a plain class
    that holds all of them, if it has another name, such as "masters"."""
    names = [other.name.split("/") for other in others if other.quantity == MOMENTS]
    attributes = {name[1] if len(name) > 1 and name[1] != name[0] else "" for name in names}
    (only, *more) = attributes or {""}
    return "moments" if more or not only or _MOMENTS.match(only) else only


EXCHANGED = said("exchanged")
_NOUNS = {
    "parameters": "parameters", "frozen": "frozen parameters", "buffers": "buffers",
    INPUTS: "model's inputs", RNG: "states of the RNG", TRAINED: "parameters",
    MODES: "modules",
}  # fmt: skip


def in_words(others: Sequence[Other], world: int) -> str:
    """Clauses about the parts that were not restored. Empty if there are none. `world`: the number of ranks."""
    groups: dict[tuple[object, ...], list[Other]] = defaultdict(list)
    for other in others:
        holds = EXCHANGED if EXCHANGED in other.holds else other.holds
        groups[other.quantity, holds, other.ranks, other.equal, other.trained].append(other)
    alone = sum(of[0].quantity == RNG for of in groups.values()) == 1
    return "; ".join(_clause(of, world, alone) for of in groups.values())


def exchanged_in_words(others: Sequence[Other]) -> str:
    """If ranks exchanged the states of all these generators among themselves: from which rank each began. Otherwise
    empty."""
    names = list(dict.fromkeys(other.name for other in others))
    ranks = sorted({rank for other in others for rank in other.ranks})
    donors = {said("of a rank", rank=rank): rank for rank in ranks}
    had = {(rank, other.name): donors.get(other.holds) for other in others for rank in other.ranks}
    of = [{had.get((rank, name)) for name in names} for rank in ranks]
    if not ranks or any(len(one) != 1 for one in of) or {one for each in of for one in each} != set(ranks):
        return ""
    states, those = ("states", "those") if len(names) > 1 else ("state", "that")
    first, *more = [f"of rank {donor}" for (donor,) in of]
    clauses = [f"rank {ranks[0]} began with the {states} of the RNG {' and '.join(names)} {first}"]
    clauses += [f"rank {rank} with {those} {donor}" for rank, donor in zip(ranks[1:], more, strict=True)]
    if len(clauses) > _MOST:
        clauses[_MOST - 1 :] = [f"{len(clauses) - _MOST + 1} more with those of others"]
    return f"{', '.join(clauses[:-1])}, and {clauses[-1]}"


def _clause(others: Sequence[Other], world: int, alone: bool) -> str:
    """A clause about parts that differ only in their names, or that all hold the values of another name. `alone`: it is
    the only clause about generators."""
    first, more = others[0], len({other.of for other in others}) - 1
    unseen = first.quantity == RNG and not first.equal and alone  # nothing is said of the other ranks then
    where = "" if unseen or len(first.ranks) == world else f" on {numbered('rank', first.ranks)}"
    likewise, apart = (f" and {more} more" if more else ""), ""
    if more and EXCHANGED in first.holds:
        likewise, apart = "", f", and {more} more {EXCHANGED} others"
    restored = first.equal and first.quantity not in (INPUTS, TRAINED, MODES)
    rest = f", and {said('kept', whose=_whose(first.equal))}" if restored else ""
    noun = f"{of_optimizer(others)} of" if first.quantity == MOMENTS else _NOUNS[first.quantity]
    noun = _NOUNS["parameters"] if first.trained else noun
    return f"the {noun} {first.of}{likewise}{where} {first.holds}{apart}{rest}"


def _whose(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}'s" if len(ranks) == 1 else f"those of ranks {', '.join(map(str, ranks))}"
