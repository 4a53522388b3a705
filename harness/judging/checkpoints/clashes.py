"""Where the checkpoints of a run clash with those of its twin, and what is left out of the comparison. Pure.

An entry is equal, or off by no more than is allowed for it: a tolerance that was given, rounding, or LEARNED_FACTOR
times the largest difference between any two twins in it. So a last bit that is never the same twice excuses another
last bit, and no buffer that was lost. What is off by somewhat more may be chance, or rounding in low precision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from statistics import median

from torchaos.harness.judging.checkpoints.bookkeeping import counts_restarts, may_be_a_clock
from torchaos.harness.judging.checkpoints.contents import Checkpoint, Clash, differing
from torchaos.harness.judging.checkpoints.pairing import Pair, family, lacking, moved, pairs
from torchaos.harness.judging.noise.rounding import LOW_PRECISION, rounding
from torchaos.harness.judging.noise.tolerance import CAP, CERTAIN, LEARNED_FACTOR
from torchaos.harness.record.history import History

_LAST_BIT = 1e-7  # relative: of a float32
_LEAST = 1e-9  # relative: what differs by less has equal sketches
Entry = tuple[str, str]  # family of the checkpoint, name


def clashes(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint], ignoring: Collection[str] = ()) -> list[Clash]:
    """All that differs by any bit between good checkpoints of one step, and those of theirs that are not ours: oldest
    first, and of one checkpoint tensors before values."""
    found = [one for pair in pairs(ours, theirs) for one in differing(*pair)]
    return in_order(one for one in (*found, *strays(ours, theirs)) if one.name not in ignoring)


def strays(ours: Sequence[Checkpoint], theirs: Sequence[Checkpoint]) -> list[Clash]:
    """Checkpoints of theirs that are not there, or of another step."""
    gone = [Clash(one.step, one.path, "checkpoint", one.path, None, _step(one)) for one in lacking(ours, theirs)]
    other = [(one, their) for one, their in moved(ours, theirs)]
    return [
        *gone,
        *(Clash(one.step, one.path, "checkpoint", one.path, _step(one), _step(their)) for one, their in other),
    ]


def in_order(found: Iterator[Clash] | Sequence[Clash]) -> list[Clash]:
    return sorted(found, key=lambda one: -1 if one.step is None else one.step)


@dataclass
class Compared:
    """What came of comparing pairs of checkpoints entry by entry."""

    clashes: list[Clash] = field(default_factory=list)
    entries: set[Entry] = field(default_factory=set)  # that were compared
    learned: dict[str, float] = field(
        default_factory=dict
    )  # entries in which the twins differ too, and by how much we did
    doubtful: dict[str, float] = field(default_factory=dict)  # by how much, where it may be chance or rounding
    rounded: float = 0.0  # the largest difference that rounding explains
    within: float = 0.0  # the largest one that the given tolerance allows
    noisy: set[str] = field(default_factory=set)  # tensors in which the twins differ by too much to judge
    unsized: set[str] = field(default_factory=set)  # other entries that differ without a fault
    restarts: set[str] = field(default_factory=set)  # values that count restarts, and count them rightly
    ignored: set[str] = field(default_factory=set)


def compare(
    found: Sequence[Pair], twins: Sequence[Sequence[Checkpoint]], history: History, tolerance: float | None,
    ignore: Sequence[str], before_s: float = 0.0,
) -> Compared:  # fmt: skip
    """`found`: ours and the first twin's; `twins`: the checkpoints of each; `history`: of the run; `tolerance`:
    relative, in place of what is learned and of rounding; `ignore`: patterns of names; `before_s`: when the
    first fault landed."""
    early = [pair for pair in found if pair[0].saved_s is not None and pair[0].saved_s < before_s]
    made, noise, usual = Compared(), {} if tolerance is not None else noise_of(twins, early), _usual_norms(found)
    least = _LAST_BIT if any(noise.values()) else 0.0  # twins may have an entry's last bit in common by chance
    for one, other in found:
        kin = family(one.path)
        made.entries |= {(kin, name) for name in (*one.tensors, *one.values) if not _is_any(name, ignore)}
        made.ignored |= {name for name in (*one.tensors, *one.values) if _is_any(name, ignore)}
        for clash in differing(one, other):
            if not _is_any(clash.name, ignore):
                theirs = _at_least(least, noise.get((kin, clash.name), 0.0))
                smaller = usual.get((kin, clash.name), 0.0) / (_norm(other, clash.name) or 1.0)  # than usual, so often
                rounded = min(CAP, rounding(history, one.step) * max(1.0, smaller))
                _sort(clash, one, theirs, rounded, tolerance, made)
    made.entries -= {entry for entry, size in noise.items() if size is None or LEARNED_FACTOR * size > CAP}
    return made


def _usual_norms(found: Sequence[Pair]) -> Mapping[Entry, float]:
    """The median norm of each tensor over the twin's checkpoints. Where the moment of a single bias crosses zero,
    rounding may be a large part of it, and is still a small part of its usual size."""
    norms: dict[Entry, list[float]] = {}
    for _one, other in found:
        for name in other.sketches:
            norms.setdefault((family(other.path), name), []).append(_norm(other, name))
    return {entry: median(each) for entry, each in norms.items()}


def _norm(one: Checkpoint, name: str) -> float:
    return next(iter(one.sketches.get(name, ())[1:]), 0.0)


def noise_of(twins: Sequence[Sequence[Checkpoint]], early: Sequence[Pair] = ()) -> Mapping[Entry, float | None]:
    """The largest difference between any two twins, by entry, of those that differ at all; None: it is of no size, or a
    clock's. Values count too that differ between the run and a twin in checkpoints from before any fault; a tensor may
    have been damaged since."""
    found: dict[Entry, float | None] = {}
    of_twins = (pair for some, others in combinations(twins, 2) for pair in pairs(some, others))
    seen = [(pair[0], clash) for pair in of_twins for clash in differing(*pair)]
    seen += [(pair[0], clash) for pair in early for clash in differing(*pair) if clash.kind == "value"]
    for one, clash in seen:
        entry = family(one.path), clash.name
        size = None if may_be_a_clock(clash) else clash.distance
        known = found.get(entry, 0.0)
        found[entry] = None if size is None or known is None else max(size, known)
    return found


def _at_least(least: float, noise: float | None) -> float | None:
    return None if noise is None else max(least, noise)


def _sort(
    clash: Clash, one: Checkpoint, noise: float | None, rounded: float, tolerance: float | None, made: Compared
) -> None:
    size = clash.distance
    if size is not None and tolerance and size <= tolerance:
        made.within = max(made.within, size)
    elif noise is None:
        made.unsized.add(clash.name)
    elif LEARNED_FACTOR * noise > CAP:
        (made.noisy if clash.kind == "tensor" else made.unsized).add(clash.name)
    elif size is not None and tolerance is None and rounded and size <= rounded:
        made.rounded = max(made.rounded, size, _LEAST)
    elif size is not None and noise > 0 and size <= LEARNED_FACTOR * noise:
        made.learned[clash.name] = max(size, made.learned.get(clash.name, 0.0))
    elif size is not None and tolerance is None and 0 < size <= max(CERTAIN * noise, LOW_PRECISION if rounded else 0.0):
        made.doubtful[clash.name] = max(size, made.doubtful.get(clash.name, 0.0))
    elif counts_restarts(clash, one):
        made.restarts.add(clash.name)
    else:
        made.clashes.append(clash)


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    """With the name of its file, or without."""
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in (name, name.partition(":")[2]))


def _step(one: Checkpoint) -> str:
    return "an unknown step" if one.step is None else f"step {one.step}"
