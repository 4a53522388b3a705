"""Compares two sets of runs, scenario by scenario: is the second set worse than the first? Pure. A difference counts if
it is larger than a tolerance, and if chance alone would cause it in at most 5 of 100 cases (exact one-sided rank test
of Mann and Whitney). The test needs at least three runs on each side. If it can't decide, the result is *unclear*,
never *the same*.

Game days ("nights") are compared in the same way. Their history is a file beside their folder, with one row for each
night; the column `score` holds the whole score.json. Each night is a sample: the share of training time in its rounds,
and the recovery times and lost steps of its faults."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.result import Recovery, Verdict, each_restart, verdicts_in_words
from torchaos.harness.reporting import trend_store
from torchaos.harness.reporting.trend_store import Kept

TOLERANCE, FLOOR_S = 0.25, 0.5  # relative; in seconds. Smaller differences do not count
_CHANCE, _FEWEST = 0.05, 3
_EXACT = 20_000  # the most ways to divide the runs into two sides that are all tried; beyond, a normal approximation


class Change(str, Enum):
    BETTER = "better"
    SAME = "same"
    WORSE = "worse"
    UNCLEAR = "unclear"
    NEW = "new"  # nothing to compare with


@dataclass(frozen=True)
class Row:
    """The comparison of one measure in one scenario. `before`, `after`: the values in words; medians if there are
    several runs."""

    scenario: str
    what: str
    before: str
    after: str
    change: Change
    why: str = ""


def compare(before: Sequence[Kept], after: Sequence[Kept], tolerance: float = TOLERANCE) -> list[Row]:
    """A row for each scenario and measure, ordered by name. `tolerance`: relative, for times."""
    rows: list[Row] = []
    for name in sorted({kept.result.scenario for kept in (*before, *after)}):
        old, new = ([one for one in side if one.result.scenario == name] for side in (before, after))
        if not new:
            rows.append(Row(name, "runs", str(len(old)), "0", Change.UNCLEAR, "there is no later run of it"))
        elif not old:
            rows.append(Row(name, "runs", "0", str(len(new)), Change.NEW, "there is no earlier one"))
        if not old or not new:
            continue
        rows.append(_verdicts(name, old, new))
        old, new = ([one for one in side if one.result.verdict in _TELLING] for side in (old, new))
        if old and new and any(one.result.recoveries for one in (*old, *new)):
            rows += _recovery(name, old, new, tolerance)
    return rows


_TELLING = (Verdict.PASSED, Verdict.FAILED)


def overall(rows: Sequence[Row]) -> Change:
    """Worse if any row is worse. Otherwise unclear if any row is unclear, or if nothing could be compared."""
    changes = {row.change for row in rows}
    for one in (Change.WORSE, Change.UNCLEAR, Change.BETTER):
        if one in changes:
            return one
    return Change.SAME if changes - {Change.NEW} else Change.UNCLEAR


def _verdicts(name: str, old: Sequence[Kept], new: Sequence[Kept]) -> Row:
    before, after = ([one.result.verdict for one in side] for side in (old, new))
    change, why = Change.SAME, ""
    if Verdict.ERROR in after and Verdict.ERROR not in before:
        change = Change.WORSE
        why = next(kept.result.reason for kept in new if kept.result.verdict is Verdict.ERROR)
    elif not set(_TELLING) & set(after):
        change, why = Change.UNCLEAR, f"no later run proves anything: {new[0].result.reason}"
    elif not set(_TELLING) & set(before):
        change, why = Change.UNCLEAR, f"no earlier run proves anything: {old[0].result.reason}"
    elif Verdict.FAILED in after and Verdict.FAILED not in before:
        change = Change.WORSE
        why = next(kept.result.reason for kept in new if kept.result.verdict is Verdict.FAILED)
    elif Verdict.FAILED in before and Verdict.FAILED not in after:
        change = Change.BETTER
    elif Verdict.FAILED in before:
        rates = [[float(one is Verdict.FAILED) for one in side if one in _TELLING] for side in (before, after)]
        if (chance := p_greater(rates[0], rates[1])) <= _CHANCE:
            change, why = Change.WORSE, f"it fails more often (p = {chance:.2g})"
    return Row(name, "verdict", verdicts_in_words(before), verdicts_in_words(after), change, why)


def _recovery(name: str, old: Sequence[Kept], new: Sequence[Kept], tolerance: float) -> list[Row]:
    before, after = ([one.caught_up_s for one in side] for side in (old, new))
    early, late = ([one for one in side if one is not None] for side in (before, after))
    row = partial(Row, name, "caught up", _middle(before, " s"), _middle(after, " s"))
    if None in after and None not in before:
        return [row(Change.WORSE, "it caught up in every run before")]
    if not early or not late:
        return [row(Change.SAME if not early and not late else Change.BETTER, "it never caught up before")]
    change, why = judged(early, late, tolerance, FLOOR_S)
    grown = _grown(old, new) if change is not Change.SAME else ""
    rows = [row(change, "; ".join(part for part in (why, grown) if part))]
    first, last = ([float(one.lost_steps) for one in side if one.lost_steps is not None] for side in (old, new))
    if first and last:
        again = judged(first, last, 0.0, 0.0)
        rows.append(Row(name, "steps done again", _middle(first, ""), _middle(last, ""), *again))
    return rows


def judged(old: Sequence[float], new: Sequence[float], tolerance: float, floor: float) -> tuple[Change, str]:
    """The judgement of a measure for which less is better. Both sides need at least one value."""
    before, after = median(old), median(new)
    low, high = sorted((before, after))
    if high <= low * (1 + tolerance) + floor:
        return Change.SAME, ""
    if after < before:
        sure = min(len(old), len(new)) >= _FEWEST and p_greater(new, old) <= _CHANCE
        return (Change.BETTER, "") if sure else (Change.SAME, "less, as far as so few runs can show")
    if min(len(old), len(new)) < _FEWEST:
        few = f"{len(old)} and {len(new)} runs can't distinguish a change from chance"
        return Change.UNCLEAR, f"{few}: --repeat {_FEWEST} or more"
    chance = p_greater(old, new)
    if chance > _CHANCE:
        return (
            Change.UNCLEAR,
            f"the runs of one side differ as much from each other (p = {chance:.2g}): repeat them more often",
        )
    return Change.WORSE, f"p = {chance:.2g}"


def p_greater(small: Sequence[float], large: Sequence[float]) -> float:
    """The probability that chance alone would rank the values of `large` at least as high as they are ranked (Mann and
    Whitney's U; equal values get their mean rank)."""
    every = sorted((*small, *large))
    ranks = [(every.index(value) + len(every) - 1 - every[::-1].index(value)) / 2 for value in (*large, *small)]
    seen, count = sum(ranks[: len(large)]), len(large)
    if math.comb(len(every), count) <= _EXACT:
        sums = [sum(some) for some in combinations(ranks, count)]
        return sum(sum_ >= seen - 1e-9 for sum_ in sums) / len(sums)
    mean = count * (len(every) - 1) / 2
    spread = math.sqrt(count * len(small) * (len(every) + 1) / 12)
    return 0.5 * math.erfc((seen - mean) / spread / math.sqrt(2))


def _grown(old: Sequence[Kept], new: Sequence[Kept]) -> str:
    """Names the part of the recovery whose time changed most."""
    parts = dict.fromkeys(part for run in old for recovery in run.result.recoveries for part in recovery.parts)
    found: list[tuple[float, str]] = []
    for part in parts.keys() - {"caught_up"}:
        early, late = ([at for one in side if (at := one.part_s(part)) is not None] for side in (old, new))
        if early and late:
            found.append((median(late) - median(early), part))
    if not found:
        return ""
    by, part = max(found, key=lambda one: abs(one[0]))
    return f"{part.replace('_', ' ')} came {abs(by):.1f} s {'later' if by > 0 else 'earlier'}"


def _middle(values: Sequence[float | None], unit: str) -> str:
    known = [one for one in values if one is not None]
    if not known:
        return "never"
    runs = f" ({len(known)} runs)" if len(values) > 1 else ""
    return f"{median(known):.4g}{unit}{runs}" + (f", never in {values.count(None)}" if None in values else "")


_FLOOR_SHARE, _FLOOR_STEPS = 0.02, 1.0  # share of the time; steps. Smaller differences do not count


@dataclass(frozen=True)
class Night:
    """One game day. `commit`: the commit of the job's working directory; empty if there is none. `raw`: the contents of
    score.json."""

    folder: str
    name: str
    seed: int
    started: str
    commit: str
    verdict: str
    why: str
    ettr: float | None  # the share of the time in which training went on
    idle: tuple[float, ...]  # for each round, the share of the time in which training did not go on
    caught_up_s: tuple[float, ...]  # for each recovery
    lost_steps: tuple[float, ...]  # for each restart
    outcomes: Mapping[str, int]  # number of faults by outcome
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, folder: Path) -> Night:
        """The night in the folder of a game day. Raises UsageError if it has no readable score."""
        try:
            return cls.of_score(str(folder), json.loads((folder / "score.json").read_text()))
        except OSError as error:
            why = f"{folder}: no score: {error.strerror}; `torchaos gameday --resume` finishes the day"
            raise UsageError(why) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{folder}/score.json: it is damaged: {error!r}") from error

    @classmethod
    def of_score(cls, folder: str, raw: Mapping[str, Any]) -> Night:
        """The night from the contents of score.json. Raises KeyError, ValueError, TypeError or AttributeError if it is
        not a score."""
        about = {key: str(raw[key]) for key in ("name", "started", "commit", "verdict")}
        shares = [_share(game_round["clock"]) for game_round in raw["rounds"]]
        faults = [fault for game_round in raw["rounds"] for fault in game_round["faults"]]
        lost = [
            one.lost_steps for game_round in raw["rounds"]
            for one in each_restart(map(_recovery_of, game_round["faults"])) if one.lost_steps is not None
        ]  # fmt: skip
        return cls(
            folder, **about, seed=int(raw["seed"]), why="; ".join(raw["why"]), ettr=_share(raw["score"]["clock"]),
            idle=tuple(1 - share for share in shares if share is not None),
            caught_up_s=tuple(float(at) for fault in faults if (at := fault["parts"].get("caught_up")) is not None),
            lost_steps=tuple(map(float, lost)),
            outcomes=Counter(fault["outcome"] for fault in faults), raw=raw,
        )  # fmt: skip


def _recovery_of(fault: Mapping[str, Any]) -> Recovery:
    return Recovery(str(fault["id"]), fault["parts"], fault["lost_steps"], at_s=fault.get("at_s"))


def _share(clock: Mapping[str, float]) -> float | None:
    whole = sum(clock.values())
    return clock["productive_s"] / whole if whole else None


def add(path: Path, nights: Sequence[Night]) -> None:
    """Adds nights to the history at `path`, which is made if it does not exist. A night that is already there is
    replaced. Raises UsageError if the file can't be used."""
    rows = (
        (night.folder, night.name, night.seed, night.started, night.commit, night.verdict, json.dumps(night.raw))
        for night in nights
    )
    trend_store.add_rows(path, "nights", rows)


def kept(path: Path, names: Sequence[str] = (), commit: str = "", beside: Sequence[Night] = ()) -> list[Night]:
    """The nights of the history at `path`, in order of time. `names`: the game days to include; empty: all. `commit`:
    the beginning of the wanted commits. `beside`: nights to add if the file lacks them. Changes no file."""
    rows = trend_store.rows_of(path, "nights", "folder", "score")
    found = {one.folder: one for one in (*(night for row in rows for night in _read(*row)), *beside)}
    wanted = (one for one in found.values() if not names or one.name in names)
    return sorted((one for one in wanted if one.commit.startswith(commit)), key=lambda one: one.started)


def _read(folder: str, raw: str) -> Iterator[Night]:
    with suppress(ValueError, KeyError, TypeError, AttributeError):  # written by a later version
        yield Night.of_score(folder, json.loads(raw))


def found_in(out: Path) -> list[Night]:
    """The game days (nights) of the folders directly below `out` that have a score.json, in order of their start."""
    return sorted(trend_store.each_in(out, "score.json", Night.of), key=lambda one: one.started)


def compare_nights(before: Sequence[Night], after: Sequence[Night], tolerance: float = TOLERANCE) -> list[Row]:
    """A row for each game day and measure, ordered by name. `tolerance`: relative, for times."""
    rows: list[Row] = []
    for name in sorted({night.name for night in (*before, *after)}):
        old, new = ([one for one in side if one.name == name] for side in (before, after))
        if not new:
            rows.append(Row(name, "nights", str(len(old)), "0", Change.UNCLEAR, "there is no later night of it"))
        elif not old:
            rows.append(Row(name, "nights", "0", str(len(new)), Change.NEW, "there is no earlier one"))
        else:
            rows += _night(name, old, new, tolerance)
    return rows


def _night(name: str, old: Sequence[Night], new: Sequence[Night], tolerance: float) -> list[Row]:
    rows = [_verdict_row(name, old, new)]
    measures: tuple[tuple[str, str, float, Callable[[Night], Sequence[float]]], ...] = (
        ("time not training", "", _FLOOR_SHARE, lambda one: one.idle),
        ("caught up", " s", FLOOR_S, lambda one: one.caught_up_s),
        ("steps done again", "", _FLOOR_STEPS, lambda one: one.lost_steps),
    )
    for what, unit, floor, of in measures:
        early, late = ([value for one in side for value in of(one)] for side in (old, new))
        if early and late:
            judgement = judged(early, late, tolerance, floor)
            rows.append(Row(name, what, _median(early, unit), _median(late, unit), *judgement))
        elif early:
            rows.append(Row(name, what, _median(early, unit), "not seen", Change.UNCLEAR, "it was seen before"))
    return rows


def _verdict_row(name: str, old: Sequence[Night], new: Sequence[Night]) -> Row:
    before, after = ({one.verdict for one in side} for side in (old, new))
    bad = [night for night in new if night.verdict in after - before - {"passed"}]
    change, why = Change.SAME, ""
    if bad:
        worst = next((night for night in bad if night.verdict != "inconclusive"), bad[0])
        change, why = Change.UNCLEAR if worst.verdict == "inconclusive" else Change.WORSE, worst.why
    elif after == {"passed"} != before:
        change = Change.BETTER
    return Row(name, "verdict", _nights_in_words(old), _nights_in_words(new), change, why)


def _nights_in_words(nights: Sequence[Night]) -> str:
    return ", ".join(f"{many} {verdict}" for verdict, many in Counter(night.verdict for night in nights).items())


def _median(values: Sequence[float], unit: str) -> str:
    return f"{median(values):.3g}{unit} ({len(values)})"
